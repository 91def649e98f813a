"""Names of keys in the configuration file."""

from __future__ import annotations

_ACRONYMS = {"ca": "CA", "cpus": "CPUs", "numa": "NUMA", "l3": "L3", "uid": "UID"}


def camel_case(name: str) -> str:
    """Name of a key in the file: ``reserved_cpus`` is ``reservedCPUs``."""
    first, *rest = name.split("_")
    return first + "".join(_ACRONYMS.get(part, part.capitalize()) for part in rest)
