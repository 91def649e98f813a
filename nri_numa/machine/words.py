"""Numbers and lists in sentences: one CPU or several, one NUMA node or several."""

from __future__ import annotations

from nri_numa.machine.cpuset import CPUSet, NUMASet

Ids = CPUSet | NUMASet | str
"""A set, or its text in the kernel's list format."""


def agree(ids: Ids, singular: str, plural: str) -> str:
    """The form of a word that goes with a list: ``is`` or ``are``."""
    return singular if str(ids).isdigit() else plural


def cpus_text(ids: Ids, *verb: str) -> str:
    """``CPU 3``, ``CPUs 3-5``; with a verb's two forms ``CPU 3 is``, ``CPUs 3-5 are``."""
    text = str(ids)
    text = f"CPU {text}" if text.isdigit() else f"CPUs {text}"
    return f"{text} {agree(ids, *verb)}" if verb else text


def numa_text(ids: Ids, *verb: str) -> str:
    """``NUMA node 1``, ``NUMA nodes 0-1``; with a verb's two forms as `cpus_text`."""
    # A digit or not tells one from several: on the way of every request, nothing is counted.
    text = str(ids)
    text = f"NUMA node {text}" if text.isdigit() else f"NUMA nodes {text}"
    return f"{text} {agree(ids, *verb)}" if verb else text


def counted(count: int, noun: str) -> str:
    """``1 CPU``, ``2 CPUs``."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def human_milli(milli: int) -> str:
    """Thousandths of CPUs: ``2 CPUs``, ``0.5 CPUs``."""
    text = f"{milli / 1000:.3f}".rstrip("0").rstrip(".")
    return f"{text} CPU" if text == "1" else f"{text} CPUs"
