"""``synthetic:KEY=VALUE,…``: a machine in one argument."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from nri_numa.machine.cpuset import NO_CPUS, CPUSet
from nri_numa.machine.model import agree, cpus_text
from nri_numa.text import HUGEPAGES, BadQuantity, page_size, whole_bytes

if TYPE_CHECKING:
    from nri_numa.machine.model import Topology

_GIB = 1 << 30
MOST_CPUS: Final = 4096
"""More CPUs than this take seconds to build and belong to no machine."""


def made_up(text: str) -> Topology:
    """Build the machine that a text describes.

    Args:
        text: ``sockets=2,numa=2,cores=8,threads=2,memory=64Gi`` and the other keys of `KEYS`;
            what is not given is as in `nri_numa.machine.synthetic.synthetic`.

    Raises:
        ValueError: with what was expected.
    """
    from nri_numa.machine.synthetic import synthetic

    given: dict[str, Any] = {}
    hugepages: dict[int, int] = {}
    seen: set[str] = set()
    for part in filter(None, text.split(",")):
        key, equals, value = part.partition("=")
        if not equals:
            raise ValueError(f"{part!r} is no KEY=VALUE; keys are {', '.join(KEYS)}")
        if key in seen:
            raise ValueError(f"{key} is given twice; expected it once")
        seen.add(key)
        try:
            if key.startswith(HUGEPAGES):
                hugepages[page_size(key)] = whole_bytes(value)
                continue
            if key not in KEYS:
                near = difflib.get_close_matches(key, KEYS, n=1)
                hint = f", did you mean {near[0]}?" if near else ""
                raise ValueError(f"there is no key {key!r}{hint}; keys are {', '.join(KEYS)}")
            name, read = KEYS[key]
            given[name] = read(value)
        except BadQuantity as error:
            raise ValueError(f"{key} is {value!r}, expected {error}") from error
    cpus = given.get("sockets", 2) * given.get("numa_per_socket", 2) * given.get("threads", 2)
    cores = given.get("cores_per_numa", 4) + given.get("efficient_cores_per_numa", 0)
    if cpus * cores > MOST_CPUS:
        raise ValueError(f"has {cpus * cores} CPUs, expected at most {MOST_CPUS}")
    if given.get("sockets_per_numa", 1) > 1:
        given.setdefault("numa_per_socket", 1)
    machine = synthetic(**given, hugepages=hugepages)
    for key in ("offline", "isolated", "nohz-full"):
        missing = given.get(KEYS[key][0], NO_CPUS) - machine.present
        if missing:
            raise ValueError(
                f"{key} names {cpus_text(missing)}, which {agree(missing, 'does', 'do')} not "
                f"exist; expected CPUs among {machine.present}"
            )
    if not machine.online:
        raise ValueError(f"offline is all of {machine.present}; expected one CPU to be left")
    return machine


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 6):
        raise BadQuantity("a whole number")
    return int(text)


def _gib(text: str) -> float:
    """Memory as a quantity; a bare number below a million is GiB."""
    amount = whole_bytes(text)
    if text.isdigit() and amount < 1_000_000:
        return float(amount)
    return amount / _GIB


def _gibs(text: str) -> list[float]:
    return [_gib(part) for part in text.split("+")]


def _cpus(text: str) -> CPUSet:
    try:
        return CPUSet.parse(text.replace("+", ","))
    except ValueError as error:
        raise BadQuantity(f"a list of CPUs such as 0-3+8 ({error})") from error


def _word(text: str) -> str:
    if text not in ("split", "adjacent", "alternating"):
        raise BadQuantity("split, adjacent or alternating")
    return text


KEYS: Final[Mapping[str, tuple[str, Callable[[str], Any]]]] = {
    "sockets": ("sockets", _count),
    "numa": ("numa_per_socket", _count),
    "sockets-per-numa": ("sockets_per_numa", _count),
    "cores": ("cores_per_numa", _count),
    "threads": ("threads", _count),
    "memory": ("memory_gib", _gib),
    "memory-only": ("memory_only_gib", _gibs),
    "efficient-cores": ("efficient_cores_per_numa", _count),
    "l3-cores": ("cores_per_l3", _count),
    "numbering": ("numbering", _word),
    "offline": ("offline", _cpus),
    "isolated": ("isolated", _cpus),
    "nohz-full": ("nohz_full", _cpus),
}
"""Key to the parameter of `synthetic` and how to read it; ``hugepages-<size>`` come on top."""
