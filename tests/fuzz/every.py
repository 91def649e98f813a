"""All fuzz targets, in the order of their turns."""

from __future__ import annotations

from typing import Final

from tests.fuzz.cluster import CLUSTER
from tests.fuzz.readers import READERS
from tests.fuzz.targets import TARGETS, Target

EVERY: Final[tuple[type[Target], ...]] = (*TARGETS, *READERS, *CLUSTER)
