"""This machine's CPUs by their place, for tests that run on two CPUs as well as on many."""

from nri_numa.model.cpuset import CPUSet
from tests.beds.cri import allowed

MACHINE = CPUSet.parse(allowed("self").cpus)
"""CPUs that a container without a pin may use."""

FIRST, LAST = str(next(iter(MACHINE))), str(max(MACHINE))
"""One CPU each, in list format; different ones on any machine with two."""

NO_CPU = "4000"
"""One that no machine of a test run has."""
