"""The explanation of a decision in sentences for people who do not know hints.

Names and annotation values come from pods and are not trusted: whatever could move a cursor, end a
line or reorder text is written as its escape.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from nri_numa.engine.align.policies import numa_node_sets_text
from nri_numa.engine.explain.explanation import (
    MISALIGNED_OUTCOME,
    REJECTED_OUTCOME,
    ExplanationDocument,
)
from nri_numa.engine.foreign_pins import RESERVATION_KIND
from nri_numa.engine.request import options
from nri_numa.model.cpuset import NUMASet
from nri_numa.model.machine import Unit, count_text, cpus_text, join_words, numa_text
from nri_numa.text import escape_unprintable, human_bytes, page_bytes_of_resource

NUMA_GLOSSARY_TEXT = (
    "(A NUMA node is a group of CPUs with memory of their own; memory of another NUMA node is "
    "slower. CPUs that no container has for itself are shared by all others.)"
)

ExplanationSection = tuple[str, list[str]]
"""A heading and sentences; the heading may be empty."""

_PREFERRED_PLACE_TEXT = "An empty machine would not have given it a narrower place."
_REJECTION_RULE_SENTENCE_PREFIX = "The rule: "
_SHARED_POOL_REJECTION_REASONS = ("SharedPoolEmpty", "SharedPoolFloor")
_OTHER_VERSION_TEXT = (
    "Why cannot be shown: the explanation was written by another version of nri-numa"
)
_MAX_LISTED_NODES = 8  # NUMA nodes that are listed one by one
_MAX_EXTERNAL_VALUE_CHARS = 120  # characters of a value from outside


def render_text(document: ExplanationDocument, width: int = 80, *, brief: bool = False) -> str:
    """The explanation; no line is wider than ``width`` columns (at least 40).

    In brief it is what the container has, what it asked for, why this place, and what is wrong.
    """
    width = max(40, width)
    lines: list[str] = []
    for heading, sentences in (
        [("", _brief_sentences(document))] if brief else explanation_sections(document)
    ):
        if heading:
            lines += ["", heading]
        for sentence in sentences:
            lines += textwrap.wrap(
                sentence, width, initial_indent="  ", subsequent_indent="    " if heading else "  "
            )
    title = f"{document['namespace']}/{document['pod']}, container {document['container']}"
    if document.get("alignment") and not brief:
        lines += ["", *textwrap.wrap(NUMA_GLOSSARY_TEXT, width)]
    return "\n".join([*textwrap.wrap(escape_unprintable(title), width), *lines])


def _brief_sentences(document: ExplanationDocument) -> list[str]:
    outcome = [
        sentence for sentence in _outcome_sentences(document) if sentence != _PREFERRED_PLACE_TEXT
    ]
    if document["outcome"] == REJECTED_OUTCOME:
        outcome = [text for text in outcome if not text.startswith(_REJECTION_RULE_SENTENCE_PREFIX)]
    parts = [" ".join(outcome)]
    if document["traced"]:
        parts += [*islice(_request_sentences(document), 1), *islice(_choice_sentences(document), 1)]
    parts += map(_to_sentence, document.get("later", ()))
    return [escape_unprintable(part) for part in parts]


def explanation_sentences(document: ExplanationDocument) -> list[str]:
    """List the sentences without headings, in the order of `render_text`."""
    return [sentence for _, sentences in explanation_sections(document) for sentence in sentences]


def explanation_sections(document: ExplanationDocument) -> list[ExplanationSection]:
    """Build headings and sentences, each in one line."""
    sections: list[ExplanationSection] = [("", list(_outcome_sentences(document)))]
    if document["traced"]:
        # The answer first, then the facts behind it.
        sections += [
            (
                "Why this place" if document["result"] else "Why no place",
                list(_choice_sentences(document)),
            ),
            ("What it asked for", list(_request_sentences(document))),
            ("What it needs", list(_demand_sentences(document))),
            ("Where that fits", list(_hint_sentences(document))),
            ("How it came about", list(_step_sentences(document))),
        ]
    sections.append(("Later", [_to_sentence(text) for text in document.get("later", ())]))
    return [
        (heading, [escape_unprintable(sentence) for sentence in sentences])
        for heading, sentences in sections
        if sentences
    ]


# --- the sections -----------------------------------------------------------------------------


def _outcome_sentences(document: ExplanationDocument) -> Iterator[str]:
    if actual := document.get("actual"):
        yield _to_sentence(f"Not so at present: {actual}")
    if document["outcome"] == REJECTED_OUTCOME:
        yield from _rejection_sentences(document)
        return
    result = document["result"]
    kind = result["kind"]
    if kind == RESERVATION_KIND:
        yield _reservation_sentence(document)
        return
    if kind == "foreign":
        yield _to_sentence(f"It is left alone: {document['summary']}")
    elif kind == "unpinned":
        yield from _unpinned_sentences(document)
    else:
        yield from _pinned_sentences(document)
    if mode := result.get("mempolicy"):
        meaning = _option_meaning("mempolicy", mode)
        yield f"The runtime was asked to start it with the memory policy {mode}: {meaning}."
    if document.get("otherVersion"):
        yield f"{_OTHER_VERSION_TEXT}."
    elif not document["traced"] and kind not in ("unpinned", "foreign"):
        yield "How this came about is not known: it was placed before the agent last started."


def _rejection_sentences(document: ExplanationDocument) -> Iterator[str]:
    rejection, message = document["rejection"], _strip_subject(document, document["summary"])
    yield _to_sentence(f"Refused ({rejection['reason']}): {message}")
    if rejection["rule"]:
        yield _to_sentence(f"{_REJECTION_RULE_SENTENCE_PREFIX}{rejection['rule']}")
    if document.get("otherVersion"):
        yield f"{_OTHER_VERSION_TEXT}."


def _reservation_sentence(document: ExplanationDocument) -> str:
    result = document["result"]
    cpus, mems = result["cpus"], result["mems"]
    parts = [cpus_text(cpus) if cpus else f"a share of {numa_text(result['numaNodes'] or mems)}"]
    parts += [f"memory of {numa_text(mems)}"] if mems else []
    return f"It does not run, and has {join_words(parts)}, {document['summary']}."


def _unpinned_sentences(document: ExplanationDocument) -> Iterator[str]:
    summary, result = document["summary"], document["result"]
    if reason := result.get("unpinnedFor"):
        yield f"It could not be pinned as asked ({reason}), and was started without being pinned."
    else:
        yield _to_sentence(f"It is {summary}")
    if result["cpus"]:
        yield f"It runs on {cpus_text(result['cpus'])}, which no container has for itself."
    if result["mems"]:
        yield f"Its memory comes from {numa_text(result['mems'])}."


def _pinned_sentences(document: ExplanationDocument) -> Iterator[str]:
    result = document["result"]
    kind = result["kind"]
    cpus = f"{'exclusive ' if kind == 'exclusive' else ''}{cpus_text(result['cpus'])}"
    sharing = ", shared with others" if kind == "shared" else ""
    memory = f", with memory of {numa_text(result['mems'])}" if result["mems"] else ""
    yield f"It runs on {cpus}{sharing}{memory}."
    if result["idleSiblings"]:
        yield (
            f"{cpus_text(result['idleSiblings'])} on the same cores stay idle, so that nothing "
            "else runs on its cores."
        )
    if document["result"].get("shortfall"):
        yield "It has less than it asks for since it was resized: no more was free there."
    elif document["outcome"] == MISALIGNED_OUTCOME:
        yield "This is a wider place than ideal."
    elif kind != "listed" and result["policy"] != "none":  # else nobody compared places
        yield _PREFERRED_PLACE_TEXT


def _request_sentences(document: ExplanationDocument) -> Iterator[str]:
    if not document["understood"]:
        return
    demand = document["demand"]
    table = {option["key"]: option for option in document["options"]}
    lists = [table.pop(key) for key in ("numacpu", "numamem") if key in table]
    bind = table["bind"]["value"] if "bind" in table else ""
    if lists:
        list_texts = [_list_text(item, cpus_only=bind == "cpu") for item in lists]
        yield f"It asked for {join_words(list_texts)}."
    if demand is None and not lists and not any(map(_is_explicit_placement_option, table.values())):
        yield "It asked for nothing about CPUs or memory."
    elif demand is not None and (not lists or _has_computed_cpus(table)):
        policy = table.pop("policy", None)
        value = policy["value"] if policy else "best-effort"
        source = f" ({_truncate_value(policy['source'])}: {value})" if policy else ""
        meaning = _option_meaning("policy", value)
        yield f"It asked for {_demand_text(demand, bind)} {meaning}{source}."
    for key, item in table.items():
        if item["source"] == "default" and (
            lists or demand is None or _is_irrelevant_default(key, demand)
        ):
            continue
        value, source = _truncate_value(item["value"]), _truncate_value(item["source"])
        verb = "it goes " if key == "policy" else ""
        yield f"{key}: {value} ({source}): {verb}{_option_meaning(key, item['value'])}."


def _list_text(option: ExplanationDocument, *, cpus_only: bool) -> str:
    """Format a requested list with its source; ``cpus_only`` is ``bind: cpu``."""
    value, source = _truncate_value(option["value"]), _truncate_value(option["source"])
    if option["key"] == "numacpu":
        return f"{cpus_text(value)} ({source})"
    return f"{'CPUs near ' if cpus_only else 'memory of '}{numa_text(value)} ({source})"


def _is_explicit_placement_option(option: ExplanationDocument) -> bool:
    """True if a pod or a rule set an option about CPUs or memory."""
    is_explicit = option["source"] != "default" and option["value"] not in ("none", "shared")
    return is_explicit and option["key"] in ("policy", "cpus", "smt", "mempolicy")


def _option_meaning(key: str, value: str) -> str:
    """Meaning of a value as the end of a sentence; other versions may store other values."""
    option = options.TABLE.by_key.get(key)
    meanings = {} if option is None else option.meanings
    return meanings.get(value, meanings.get("", "not known to this version"))


def _has_computed_cpus(requested: Mapping[str, Mapping[str, Any]]) -> bool:
    """True if CPUs are computed, also beside listed memory."""
    return "policy" in requested and requested["policy"]["value"] != "none"


def _is_irrelevant_default(key: str, demand: Mapping[str, Any]) -> bool:
    """True for a default about exclusive CPUs of a container without any."""
    return key in ("smt", "load") and not demand["exclusiveCpus"]


def _demand_sentences(document: ExplanationDocument) -> Iterator[str]:
    demand = document["demand"]
    if demand is None:
        return
    cpus = Unit.MILLI_CPUS.amount_text(demand["ownCpuMilli"])
    milli_text = _within_pod_text(demand["cpuMilli"], demand["ownCpuMilli"], Unit.MILLI_CPUS)
    if demand["cpuFrom"] == "limit":
        yield f"{cpus}: its CPU limit{milli_text}."
    elif demand["cpuFrom"] == "request":
        yield f"{cpus}: its CPU request{milli_text}."
    else:
        yield "It has no CPU limit and no CPU request: it counts as needing none."
    if demand["cpuModeReason"]:
        subject = "It shares CPUs with others"
        if count := demand["exclusiveCpus"]:
            subject = "It is exclusive" if count == 1 else "They are exclusive"
        yield f"{subject}, because {demand['cpuModeReason']}."
    memory = Unit.BYTES.amount_text(demand["ownMemoryBytes"])
    bytes_text = _within_pod_text(demand["memoryBytes"], demand["ownMemoryBytes"], Unit.BYTES)
    if demand["memoryFrom"] == "limit":
        yield f"{memory} of memory: its memory limit{bytes_text}."
    elif demand["memoryFrom"] == "request":
        score = demand["oomScore"]
        source = f"its request, worked out from its OOM score {score}"
        yield f"About {memory} of memory: {source}{bytes_text}."
    else:
        yield "It has no memory limit, and no memory request that the runtime reports."
    for pages in demand["hugePages"]:
        amount, size = (Unit.BYTES.amount_text(pages[key]) for key in ("bytes", "sizeBytes"))
        yield f"{amount} in huge pages of {size}: its limit."
    for note in demand["notes"]:
        yield _to_sentence(note)


def _within_pod_text(amount: int, own_amount: int, unit: Unit) -> str:
    """Clause about the part of a limit that counts within the pod's sum; empty if all counts."""
    if amount == own_amount:
        return ""
    return f"; {unit.amount_text(amount)} of it count: its pod's sum leaves no more"


def _hint_sentences(document: ExplanationDocument) -> Iterator[str]:
    resources = document["resources"]
    for resource in resources:
        yield _to_sentence(f"{_resource_label(resource['resource'])}: {_hint_sentence(resource)}")
    rejection = document["rejection"] or {"reason": ""}
    yield from _free_sentences(
        resources, pool_rejects=rejection["reason"] in _SHARED_POOL_REJECTION_REASONS
    )
    if not resources and document["free"]:
        amounts = [
            f"NUMA node {o['numaNode']}: {_amounts_text(o)}"
            for o in document["free"][:_MAX_LISTED_NODES]
        ]
        unlisted = len(document["free"]) - _MAX_LISTED_NODES
        more_text = f"; and {unlisted} more NUMA nodes" if unlisted > 0 else ""
        yield f"Free before it: {'; '.join(amounts)}{more_text}."


def _choice_sentences(document: ExplanationDocument) -> Iterator[str]:
    alignment = document["alignment"]
    if alignment is not None:
        yield from _alignment_sentences(document, alignment)
    if document["outcome"] == REJECTED_OUTCOME:
        return
    by_problem: dict[str, list[str]] = {}
    for mask in document["rejectedMasks"]:
        by_problem.setdefault(_rejected_mask_sentence(document, mask), []).append(mask["numaNodes"])
    for problem, node_sets in by_problem.items():
        if all(map(str.isdigit, node_sets)):
            nodes_text = numa_text(NUMASet(map(int, node_sets)))
        else:
            nodes_text = (
                f"the set{'s' if len(node_sets) > 1 else ''} of NUMA nodes {'; '.join(node_sets)}"
            )
        yield _to_sentence(f"{nodes_text}{' each' if len(node_sets) > 1 else ''} lost: {problem}")
    pool_before, pool_after = document["pool"]["before"], document["pool"]["after"]
    if pool_before != pool_after:
        yield f"The shared CPUs were {pool_before}, and are {pool_after} from now on."


def _alignment_sentences(
    document: ExplanationDocument, alignment: Mapping[str, Any]
) -> Iterator[str]:
    reason = alignment["reason"].partition(" (NUMA node")[0]  # read: the numbers follow below
    if not alignment["admitted"]:
        yield _to_sentence(f"Policy {alignment['policy']} finds no place: {reason}")
        return
    if alignment["numaNodes"] is None:
        yield _to_sentence(f"NUMA nodes did not matter: {reason}")
        return
    nodes_text = numa_text(alignment["numaNodes"])
    for verb in (" suits every resource", " suit every resource"):
        if reason == nodes_text + verb:
            reason = f"{'it' if verb.startswith(' suits') else 'they'}{verb}"
    scope_text = " for the whole pod" if alignment["scope"] == "pod" else ""
    though = "" if alignment["preferred"] else ", though wider than ideal"
    won = "would have won" if document["outcome"] == REJECTED_OUTCOME else "won"
    yield _to_sentence(f"{nodes_text} {won}{scope_text}{though}: {reason}")


def _step_sentences(document: ExplanationDocument) -> Iterator[str]:
    for text in document["decisionSteps"]:
        if document["alignment"] is None or not text.startswith("policy "):  # said already
            yield _to_sentence(_strip_subject(document, text))


# --- parts of sentences -----------------------------------------------------------------------


def _demand_text(demand: Mapping[str, Any], bind: str) -> str:
    count, milli = demand["exclusiveCpus"], demand["cpuMilli"]
    parts = []
    if count:
        parts.append(count_text(count, "exclusive CPU"))
    elif milli:
        parts.append(f"{Unit.MILLI_CPUS.amount_text(milli)} to share")
    if bind != "cpu":
        if demand["memoryBytes"]:
            parts.append(Unit.BYTES.amount_text(demand["memoryBytes"]))
        parts += [
            f"{Unit.BYTES.amount_text(p['bytes'])} in huge pages" for p in demand["hugePages"]
        ]
    return join_words(parts) if parts else "a place to run"


def _hint_sentence(resource: Mapping[str, Any]) -> str:
    need = Unit(resource["unit"]).amount_text(resource["demand"])
    if resource["hint"] == "none":
        return "any NUMA node suits."
    if resource["hint"] == "impossible":
        return f"{need} needed, {_shortage_sentence(resource)}."
    ideal, width = resource["preferredNumaNodes"], resource["minNumaNodes"]
    if width == 1:
        sufficient = NUMASet(n["numaNode"] for n in resource["numaNodes"] if n["sufficient"])
        verb = "has that" if len(sufficient) == 1 else "each have that"
        nodes_text = f": {numa_text(str(sufficient))} {verb}" if sufficient else ""
        return f"{need} needed. One NUMA node is enough{nodes_text}."
    if ideal == width:
        sets = [s["numaNodes"] for s in resource["sets"] if s["preferred"]]
        sets_text = numa_node_sets_text(sets, resource["allSetsFit"], resource["narrowestCount"])
        return f"{need} needed. Even an empty machine would need {width} NUMA nodes: {sets_text}."
    if width < ideal:
        return f"{need} needed. {width} NUMA nodes are enough; another resource needs {ideal}."
    ideal_text = "one NUMA node" if ideal == 1 else f"{ideal} NUMA nodes"
    return f"{need} needed. On an empty machine {ideal_text} would be enough; now it takes {width}."


def _shortage_sentence(resource: Mapping[str, Any]) -> str:
    """Clause with needed and free amounts of a resource that does not fit anywhere."""
    amount, capacity = (sum(n[key] for n in resource["numaNodes"]) for key in ("free", "capacity"))
    capacity_text = Unit(resource["unit"]).amount_text(capacity)
    if capacity < resource["demand"]:
        return f"and all NUMA nodes together have {capacity_text}"
    free_text = Unit(resource["unit"]).amount_text(amount, free=True)
    clause = f"{free_text} of {capacity_text} free on all NUMA nodes together"
    return clause if amount < resource["demand"] else f"{clause}, but not beside what else it needs"


def _free_sentences(resources: Sequence[Mapping[str, Any]], *, pool_rejects: bool) -> Iterator[str]:
    """Yield free amounts of each NUMA node for needed resources, with the need if too small.

    Without CPUs if the pool floor of the whole machine is the reason (``pool_rejects``).
    """
    by_node: dict[int, list[str]] = {}
    for r in resources:
        if r["hint"] == "none" or (pool_rejects and r["unit"] == "cpus"):
            continue
        for n in r["numaNodes"]:
            note = (
                "" if n["sufficient"] else f" ({Unit(r['unit']).amount_text(r['demand'])} needed)"
            )
            by_node.setdefault(n["numaNode"], []).append(f"{_free_of_capacity_text(n, r)}{note}")
    nodes_by_text: dict[str, list[int]] = {}
    for i in sorted(by_node):
        nodes_by_text.setdefault(join_words(by_node[i]), []).append(i)
    for text, numa_nodes in islice(nodes_by_text.items(), _MAX_LISTED_NODES):
        suffix = " each" if len(numa_nodes) > 1 else ""
        yield f"Free on {numa_text(NUMASet(numa_nodes))}{suffix}: {text}."
    if len(nodes_by_text) > _MAX_LISTED_NODES:
        unlisted = sum(map(len, islice(nodes_by_text.values(), _MAX_LISTED_NODES, None)))
        yield f"And so on for {unlisted} more NUMA nodes."


def _rejected_mask_sentence(document: ExplanationDocument, mask: Mapping[str, Any]) -> str:
    """Clause with the reason for a rejected mask, and the numbers that decided."""
    winner, loser = document["alignment"]["numaNodes"], mask["numaNodes"]
    if mask["separatedBy"] == "preferred":
        for r in document["resources"]:
            for n in r["numaNodes"]:
                if str(n["numaNode"]) == loser and not n["sufficient"]:
                    need = Unit(r["unit"]).amount_text(r["demand"])
                    return f"it has only {_free_of_capacity_text(n, r)} free, and {need} needed"
        return "it is wider than an empty machine would need"
    demand = document["demand"]
    if mask["separatedBy"] == "rank" and (
        demand["cpuMilli"] or demand["memoryBytes"] or demand["hugePages"]
    ):
        # As the strategy does: the scarcest first, then the next.
        for measure, winner_measure in zip(
            _usage_shares_after_placement(document, winner),
            _usage_shares_after_placement(document, loser),
            strict=False,
        ):
            if measure[0] == winner_measure[0]:
                continue
            winner_text = f"{measure[1]} of {numa_text(winner)}"
            use = f"{winner_measure[1]} would be in use, against {winner_text}"
            if measure[0] < winner_measure[0]:
                return f"it would do as well, but would be fuller: {use}"
            if any("of the opposite load" in text for text in document["decisionSteps"]):
                return "it has too few CPUs beside containers of the opposite load"
            return f"it would do as well, but would be emptier ({use}), and strategy decides"
        if winner.isdigit() and loser.isdigit() and int(winner) < int(loser):
            return "it would do just as well, and the lower number wins"
    return str(mask["text"])


def _usage_shares_after_placement(
    document: ExplanationDocument, numa_node: str
) -> list[tuple[float, str]]:
    """List used fractions of a NUMA node with the container, and their texts; largest first."""
    usage: list[tuple[float, str]] = []
    for r in document["resources"]:
        for n in r["numaNodes"]:
            if str(n["numaNode"]) == numa_node and n["capacity"] > 0:
                part = (n["capacity"] - n["free"] + r["demand"]) / n["capacity"]
                if part > 1:
                    return []  # NUMA nodes without CPUs serve it too, or it lies on several
                usage.append((part, f"{100 * part:.3g}% of its {_resource_label(r['resource'])}"))
    return sorted(usage, reverse=True)


def _free_of_capacity_text(n: Mapping[str, Any], resource: Mapping[str, Any]) -> str:
    """``7 of 8 CPUs for exclusive use``, ``512 MiB of 16 GiB of memory``."""
    free_text = Unit(resource["unit"]).amount_text(n["free"], free=True)
    capacity = Unit(resource["unit"]).amount_text(n["capacity"])
    if free_text.partition(" ")[2] == capacity.partition(" ")[2]:
        free_text = free_text.partition(" ")[0]
    name = resource["resource"]
    label = "" if name == "cpu" else f" of {_resource_label(name)}"
    label += " for exclusive use" if resource["unit"] == "cpus" else ""
    return f"{free_text} of {capacity}{label}"


def _amounts_text(amounts: Mapping[str, Any]) -> str:
    parts = [Unit.MILLI_CPUS.amount_text(amounts["cpuMilli"])]
    if "memoryBytes" in amounts:
        parts.append(Unit.BYTES.amount_text(amounts["memoryBytes"], free=True) + " of memory")
    return join_words(parts)


def _resource_label(resource: str) -> str:
    if resource.startswith("hugepages-"):
        return f"huge pages of {human_bytes(page_bytes_of_resource(resource))}"
    return {"cpu": "CPUs", "memory": "memory"}.get(resource) or _truncate_value(resource)


def _truncate_value(value: str) -> str:
    return (
        value
        if len(value) <= _MAX_EXTERNAL_VALUE_CHARS
        else f"{value[:_MAX_EXTERNAL_VALUE_CHARS]}…"
    )


def _strip_subject(document: ExplanationDocument, message: str) -> str:
    """Remove the subject from a message, because the heading names it.

    Rejections are stored with the kubelet's whole message, and steps quote it.
    """
    subject = f"pod {document['namespace']}/{document['pod']}, container {document['container']}: "
    return message.replace(subject, "", 1)  # read: shown without what stands above it


def _to_sentence(clause: str) -> str:
    if "/" not in clause.partition(" ")[0]:  # the name of a resource stays as it is
        clause = clause[:1].upper() + clause[1:]
    return clause if clause.endswith((".", "!", "?")) else clause + "."


def start_delay_text(seconds: float) -> str:
    """A delay, which over CRI is never sure: ``late by at most 12 ms: it started before …``.

    Seconds from when its process was made until it had what was decided.
    """
    if seconds <= 0:
        return "in time: it had its CPUs when it started"
    return (
        f"late by at most {seconds * 1000:.0f} ms: it started before its CPUs were decided and set"
    )


def displaced_text(cpus: str) -> str:
    """``displaced, own CPU 2 offline: on the shared pool until one is back``."""
    noun = "CPU" if cpus.isdigit() else "CPUs"
    return f"displaced, own {noun} {cpus} offline: on the shared pool until one is back"


_MAX_NAMED_HOLDERS = 3  # that are named


def drift_text(text: str, time_text: str, owners: Sequence[str], *, is_abandoned: bool) -> str:
    """``meant 4-7, has 0-7 since 12 s, on exclusive CPUs of shop/db/server``.

    ``time_text`` is a duration or a start time; ``is_abandoned`` means no further repairs.
    """
    parts = [f"{text} since {time_text}"]
    if owners:
        named = list(owners[:_MAX_NAMED_HOLDERS])
        if len(owners) > _MAX_NAMED_HOLDERS:
            named.append(f"{len(owners) - _MAX_NAMED_HOLDERS} more")
        parts.append(f", on exclusive CPUs of {join_words(named)}")
    if is_abandoned:
        parts.append(
            "; put right again and again, and now left as it is, because something else rewrites it"
        )
    return "".join(parts)
