"""What every refusal must be: its first clause names what failed, need against have."""

import re

from nri_numa.engine.decision import Rejected
from nri_numa.engine.request.demand import SLOTS_KEY
from nri_numa.engine.request.options import TABLE

_WHO = re.compile(r"(?:resize rejected: )?pod \S+, container \S+: ")
_RESOURCE = r"(?:cpu|memory|hugepages-\d+[KMG]i|[\w.-]+/[\w.-]+)"
_SHORT = re.compile(rf"({_RESOURCE}): (.+?) needed, (.+)")
_RESOURCES = rf"{_RESOURCE}(?:(?:, | and ){_RESOURCE})*"
_SEVERAL = re.compile(rf"{_RESOURCES}: (each fits, but|different numbers) .+")
_TOGETHER = re.compile(r"policy [a-z-]+: its pod was placed on NUMA nodes? [\d,-]+, .+")
_DEVICES = re.compile(rf"{_RESOURCES}: (?:the kubelet gave|it has) .+ \(NUMA nodes? .+\).*")
_KEY = re.compile(rf"(?:{'|'.join((*TABLE.keys, SLOTS_KEY))}) is '.*?'.* \(.+?\)")
_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}

SHORTAGES = {
    "TopologyAffinityError",
    "DeviceAffinityError",
    "NotEnoughCPUs",
    "NotEnoughMemory",
    "SMTAlignmentError",
}
"""Reasons for which something is short by a number."""
WITHHELD = {"SharedPoolEmpty", "SharedPoolFloor", "QuotaExceeded"}
"""Reasons for which a grant would withhold too much from others."""
VALUES = {
    "FractionalCPUs",
    "NoCPURequest",
    "CPURequestUnknown",
    "CPUsNotRequested",
    "SlotsMismatch",
}
"""Reasons that lie in the container's resources."""

CLAIMS = {"ClaimInUse", "ClaimNotPrepared"}
"""Reasons that lie in a ResourceClaim, of which the pod's annotations say nothing."""


def first_clause(message: str) -> str:
    """Up to the first semicolon, without the pod's name."""
    found = _WHO.match(message)
    assert found, message
    return message[found.end() :].partition("; ")[0]


def shortage(clause: str) -> tuple[str, float, float] | None:
    """Resource, need and have, in CPUs or bytes; None when several fit apart only."""
    found = _SHORT.search(clause)
    if found is None or "whole cores have" in clause:
        return None
    if found[3].startswith("fits on "):
        return None  # enough is free, on too many NUMA nodes: the numbers count these
    return found[1], amount(found[2]), amount(found[3])


def amount(text: str) -> float:
    found = re.search(r"(\d[\d.]*)(?: ([KMGT]iB|bytes))?", text)
    assert found, text
    return float(found[1]) * _UNITS.get(found[2], 1)


def grammar(message: str) -> str:
    """What is wrong with one and several; empty when nothing is."""
    for noun in ("CPU", "NUMA node"):
        for found in re.finditer(rf"\b{noun}(s?) (\d[\d,-]*)(?=[ ,;:)]|$)", message):
            if bool(found[1]) is found[2].strip(",-").isdigit():
                return found[0]
        for found in re.finditer(
            rf"(?<![\d.])([\d.]+) (?:exclusive )?{noun}(s?)\b(?! shares)", message
        ):
            if bool(found[2]) is (found[1] == "1"):
                return found[0]
    return ""


def problem(rejected: Rejected) -> str:
    """Why the refusal is not what it must be; empty when it is."""
    clause = first_clause(rejected.message)
    if wrong := grammar(rejected.message):
        return f"one or several: {wrong}"
    if re.search(r"\b(own CPUs?|its own|left|available)\b", clause):
        return "words"
    if rejected.reason in SHORTAGES:
        return _shortage_problem(clause)
    if rejected.reason in WITHHELD:
        named = clause.startswith("cpu: ") or _KEY.match(clause)
        return "" if named and len(re.findall(r"\d+", clause)) > 1 else "names no CPUs or numbers"
    if rejected.reason in VALUES and re.match(r"cpu(?: request)? is .+, expected .+", clause):
        return ""
    if rejected.reason in CLAIMS:
        return "" if "ResourceClaim" in clause else "names no claim"
    if rejected.reason == "RuntimeAddsCPUs":
        return "" if re.match(r"(annotation|variable) \S+ is set, ", clause) else "names no source"
    return "" if _KEY.match(clause) else "names no annotation"


def _shortage_problem(clause: str) -> str:
    if _SEVERAL.fullmatch(clause):
        return "" if len(re.findall(r"\d (?:exclusive )?[CGMKb]", clause)) > 1 else "no needs"
    if _TOGETHER.fullmatch(clause) or _DEVICES.fullmatch(clause):
        return ""
    short = _SHORT.fullmatch(clause) or (_KEY.match(clause) and _SHORT.search(clause))
    if not short:
        return "names no resource"
    fits = re.search(r"needed, fits on (\d+) NUMA nodes?, on an empty machine on (\d+)", clause)
    if fits:
        return "" if int(fits[1]) > int(fits[2]) else "takes no more than on an empty machine"
    told = shortage(clause)
    if told is not None and told[1] <= told[2] and "but not together" not in clause:
        # Tied to groups of others, as the kubelet's memory rules have it.
        return "" if "the kubelet's rules" in clause else "has as much as it needs"
    return ""
