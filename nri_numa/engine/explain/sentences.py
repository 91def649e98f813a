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
from nri_numa.model.machine import (
    Unit,
    count_text,
    cpus_text,
    inflect_for_ids,
    join_words,
    listed_words_text,
    numa_text,
)
from nri_numa.text import escape_unprintable, human_bytes, page_bytes_of_resource

NUMA_GLOSSARY_TEXT = (
    "(A NUMA node is a group of CPUs and the memory next to them. Memory of another NUMA node is "
    "slower. CPUs that are exclusive to no container form the shared pool.)"
)

ExplanationSection = tuple[str, list[str]]
"""A heading and sentences; the heading may be empty."""

_PREFERRED_PLACE_TEXT = "This is the best possible alignment, even on an empty machine."
_REJECTION_RULE_SENTENCE_PREFIX = "The rule: "
_SHARED_POOL_REJECTION_REASONS = ("SharedPoolEmpty", "SharedPoolFloor")
_OTHER_VERSION_TEXT = (
    "Details cannot be shown, because another version of nri-numa wrote the explanation"
)
_CODE_WORDS = frozenset(("cpu", *options.TABLE.by_key))
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
    left_out = (_PREFERRED_PLACE_TEXT, _REJECTION_RULE_SENTENCE_PREFIX)
    outcome = [text for text in _outcome_sentences(document) if not text.startswith(left_out)]
    parts = [" ".join(outcome)]
    if document["traced"]:
        parts += [*islice(_request_sentences(document), 1), *islice(_choice_sentences(document), 1)]
    parts += map(_to_sentence, document.get("later", ()))
    return [escape_unprintable(part) for part in parts]


def explanation_sentences(document: ExplanationDocument) -> list[str]:
    """List the sentences without headings, in the order of `render_text`."""
    return [sentence for _, sentences in explanation_sections(document) for sentence in sentences]


def choice_sentences(document: ExplanationDocument) -> list[str]:
    """List the sentences about the chosen and the rejected NUMA nodes, and the shared pool."""
    return [escape_unprintable(sentence) for sentence in _choice_sentences(document)]


def explanation_sections(document: ExplanationDocument) -> list[ExplanationSection]:
    """Build headings and sentences, each in one line."""
    sections: list[ExplanationSection] = [("", list(_outcome_sentences(document)))]
    if document["traced"]:
        # The answer first, then the facts behind it.
        sections += [
            (
                "Choice of NUMA nodes" if document["result"] else "Why it was rejected",
                list(_choice_sentences(document)),
            ),
            ("Placement options", list(_request_sentences(document))),
            ("Demand", list(_demand_sentences(document))),
            ("Free resources", list(_hint_sentences(document))),
            ("Steps of the decision", list(_step_sentences(document))),
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
        yield _to_sentence(f"At present: {actual}")
    if document["outcome"] == REJECTED_OUTCOME:
        yield from _rejection_sentences(document)
        return
    result = document["result"]
    kind = result["kind"]
    if kind == RESERVATION_KIND:
        yield _reservation_sentence(document)
        return
    if kind == "foreign":
        yield _to_sentence(f"nri-numa leaves it alone: {document['summary']}")
    elif kind == "unpinned":
        yield from _unpinned_sentences(document)
    else:
        yield from _pinned_sentences(document)
    if mode := result.get("mempolicy"):
        meaning = _option_meaning("mempolicy", mode)
        yield f"The runtime starts it with the memory policy {mode}: {meaning}."
    if document.get("otherVersion"):
        yield f"{_OTHER_VERSION_TEXT}."
    elif not document["traced"] and kind not in ("unpinned", "foreign"):
        yield "The steps of this decision are not known: it was made before the agent last started."


def _rejection_sentences(document: ExplanationDocument) -> Iterator[str]:
    refusal, message = document["rejection"], _strip_subject(document, document["summary"])
    yield _to_sentence(f"Rejected ({refusal['reason']}): {message}")
    if refusal["rule"]:
        yield _to_sentence(f"{_REJECTION_RULE_SENTENCE_PREFIX}{refusal['rule']}")
    if document.get("otherVersion"):
        yield f"{_OTHER_VERSION_TEXT}."


def _reservation_sentence(document: ExplanationDocument) -> str:
    result = document["result"]
    cpus, mems, summary = result["cpus"], result["mems"], str(document["summary"])
    parts = [cpus_text(cpus) if cpus else f"a share of {numa_text(result['numaNodes'] or mems)}"]
    parts += [f"memory of {numa_text(mems)}"] if mems else []
    return f"It does not run. {summary[:1].upper()}{summary[1:]}: {join_words(parts)}."


def _unpinned_sentences(document: ExplanationDocument) -> Iterator[str]:
    summary, result = document["summary"], document["result"]
    if reason := result.get("unpinnedFor"):
        yield f"Pinning failed ({reason}); the container was started unpinned."
    else:
        yield _to_sentence(f"It is {summary}")
    if result["cpus"]:
        yield f"It runs on the shared pool, {cpus_text(result['cpus'])}."
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
        idle_text = cpus_text(result["idleSiblings"], "stays", "stay")
        yield f"{idle_text} idle, so nothing else runs on its cores."
    if result.get("shortfall"):
        yield "Its last resize gave it less than it requests, because no more was free there."
    elif document["outcome"] == MISALIGNED_OUTCOME:
        yield "It is misaligned: on an empty machine it would need fewer NUMA nodes."
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
        yield f"It requests {join_words(list_texts)}."
    if demand is None and not lists and not any(map(_is_explicit_placement_option, table.values())):
        yield "It requests no placement of CPUs or memory."
    elif demand is not None and (not lists or _has_computed_cpus(table)):
        policy = table.pop("policy", None)
        value = policy["value"] if policy else "best-effort"
        source = f" ({_truncate_value(policy['source'])}: {value})" if policy else ""
        meaning = _option_meaning("policy", value)
        yield f"It requests {_demand_text(demand, bind)} {meaning}{source}."
    for key, item in table.items():
        if item["source"] == "default" and (
            lists or demand is None or _is_irrelevant_default(key, demand)
        ):
            continue
        value, source = _truncate_value(item["value"]), _truncate_value(item["source"])
        verb = "it is placed " if key == "policy" else ""
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
    meanings = options.TABLE.by_key[key].meanings if key in options.TABLE.by_key else {}
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
        yield "No CPU request or limit: counted as 0 CPUs."
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
        source = f"its memory request, derived from its OOM score {score}"
        yield f"About {memory} of memory: {source}{bytes_text}."
    else:
        yield "No memory limit, and the runtime reports no memory request."
    for pages in demand["hugePages"]:
        amount, size = (Unit.BYTES.amount_text(pages[key]) for key in ("bytes", "sizeBytes"))
        yield f"{amount} in huge pages of {size}: its limit."
    for note in demand["notes"]:
        yield _to_sentence(note)


def _within_pod_text(amount: int, own_amount: int, unit: Unit) -> str:
    """Clause about the part of a limit that counts within the pod's sum; empty if all counts."""
    if amount == own_amount:
        return ""
    return f"; {unit.amount_text(amount)} of it count, because the limit of its pod leaves no more"


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
        yield f"Free before its placement: {'; '.join(amounts)}{more_text}."


def _choice_sentences(document: ExplanationDocument) -> Iterator[str]:
    alignment = document["alignment"]
    if alignment is not None:
        yield from _alignment_sentences(document, alignment)
    if document["outcome"] == REJECTED_OUTCOME:
        return
    by_predicate: dict[tuple[str, str], list[str]] = {}
    for mask in document["rejectedMasks"]:
        by_predicate.setdefault(_rejected_mask_predicate(document, mask), []).append(
            mask["numaNodes"]
        )
    for (singular, plural), node_sets in by_predicate.items():
        if all(map(str.isdigit, node_sets)):
            nodes_text = numa_text(NUMASet(map(int, node_sets)))
        else:
            nodes_text = (
                f"the set{'s' if len(node_sets) > 1 else ''} of NUMA nodes {'; '.join(node_sets)}"
            )
        yield _to_sentence(f"{nodes_text} {plural if len(node_sets) > 1 else singular}")
    pool_before, pool_after = document["pool"]["before"], document["pool"]["after"]
    if pool_before != pool_after:
        yield f"Shared pool: was {pool_before or 'empty'}, now {pool_after or 'empty'}."


def _alignment_sentences(
    document: ExplanationDocument, alignment: Mapping[str, Any]
) -> Iterator[str]:
    reason = alignment["reason"].partition(" (NUMA node")[0]  # read: the numbers follow below
    devices = document.get("misalignedDevices")
    if devices is not None and devices["apart"]:
        reason = devices["text"]
    elif devices is not None:
        yield _to_sentence(devices["text"])
    if not alignment["admitted"]:
        yield _to_sentence(f"Policy {alignment['policy']} rejects it: {reason}")
        return
    if alignment["numaNodes"] is None:
        if len(document["free"]) != 1:
            yield _to_sentence(f"No NUMA constraint applies: {reason}")
        return
    nodes = alignment["numaNodes"]
    if alignment["preferred"] and alignment["exact"]:
        reason = f"{inflect_for_ids(nodes, 'it has', 'they have')} room for everything"
    scope_text = " for the whole pod" if alignment["scope"] == "pod" else ""
    though = "" if alignment["preferred"] else ", though misaligned"
    choice_text = inflect_for_ids(nodes, "was chosen", "were chosen")
    if document["outcome"] == REJECTED_OUTCOME:
        choice_text = "would have been chosen"
    yield _to_sentence(f"{numa_text(nodes)} {choice_text}{scope_text}{though}: {reason}")


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
            parts.append(f"{Unit.BYTES.amount_text(demand['memoryBytes'])} of memory")
        parts += [
            f"{Unit.BYTES.amount_text(p['bytes'])} in huge pages" for p in demand["hugePages"]
        ]
    return join_words(parts) if parts else "CPUs"


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
        return f"all NUMA nodes together have {capacity_text}"
    free_text = _part_text(Unit(resource["unit"]), amount, capacity)
    clause = f"{free_text} free on all NUMA nodes together"
    if amount < resource["demand"]:
        return clause
    return f"{clause}, but not together with the other resources"


def _free_sentences(resources: Sequence[Mapping[str, Any]], *, pool_rejects: bool) -> Iterator[str]:
    """Yield free amounts of each NUMA node for needed resources, with the need if too small.

    Without CPUs if the pool floor of the whole machine is the reason (``pool_rejects``).
    """
    by_node: dict[int, list[str]] = {}
    for r in resources:
        if r["hint"] == "none" or (pool_rejects and r["unit"] == "cpus"):
            continue
        for n in r["numaNodes"]:
            note = f" ({Unit(r['unit']).amount_text(r['demand'])} needed)"
            if n["sufficient"] or _are_devices_elsewhere(r, n):
                note = ""
            by_node.setdefault(n["numaNode"], []).append(f"{_free_of_capacity_text(n, r)}{note}")
    nodes_by_text: dict[str, list[int]] = {}
    for i in sorted(by_node):
        nodes_by_text.setdefault(join_words(by_node[i]), []).append(i)
    for text, numa_nodes in islice(nodes_by_text.items(), _MAX_LISTED_NODES):
        suffix = " each" if len(numa_nodes) > 1 else ""
        yield f"Free on {numa_text(NUMASet(numa_nodes))}{suffix}: {text}."
    if len(nodes_by_text) > _MAX_LISTED_NODES:
        unlisted = sum(map(len, islice(nodes_by_text.values(), _MAX_LISTED_NODES, None)))
        yield f"{count_text(unlisted, 'more NUMA node')} are not shown."


def _are_devices_elsewhere(resource: Mapping[str, Any], amount: Mapping[str, Any]) -> bool:
    """Return True if a NUMA node has the free devices, and the kubelet gave other ones."""
    return bool(resource["unit"] == Unit.NUMBER and amount["free"] >= resource["demand"])


def _missing_resource_text(resources: Sequence[Mapping[str, Any]], numa_node: str) -> str:
    """Clause about the first resource that a NUMA node has too little of."""
    for r in resources:
        for n in r["numaNodes"]:
            if str(n["numaNode"]) == numa_node and not n["sufficient"]:
                if _are_devices_elsewhere(r, n):
                    return f"its {_resource_label(r['resource'])} is elsewhere"
                need = Unit(r["unit"]).amount_text(r["demand"])
                return f"{_free_of_capacity_text(n, r, ' free')}, {need} needed"
    return "more NUMA nodes than an empty machine would need"


def _rejected_mask_predicate(
    document: ExplanationDocument, mask: Mapping[str, Any]
) -> tuple[str, str]:
    """Predicate about a rejected mask with the numbers that decided, for one and for several."""
    winner, loser = document["alignment"]["numaNodes"], mask["numaNodes"]
    if mask["separatedBy"] == "preferred":
        return _rejection_predicate(_missing_resource_text(document["resources"], loser))
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
            is_fuller = measure[0] < winner_measure[0]
            if not is_fuller and any(
                "of the opposite load" in text for text in document["decisionSteps"]
            ):
                return _rejection_predicate("too few CPUs beside containers of the opposite load")
            use = f"{winner_measure[1]}, {numa_text(winner)} {measure[1]}"
            if measure[1] == winner_measure[1]:  # less than is shown
                degree = f"slightly {'fuller' if is_fuller else 'emptier'} than {numa_text(winner)}"
                return f"would be {degree}", f"would each be {degree}"
            rule = "" if is_fuller else "; the strategy prefers fuller NUMA nodes"
            return f"would be {use}{rule}", f"would each be {use}{rule}"
        if winner.isdigit() and loser.isdigit() and int(winner) < int(loser):
            rule = "equally well; the lowest number is taken"
            return f"fits {rule}", f"fit {rule}"
    return _rejection_predicate(str(mask["text"]))


def _rejection_predicate(problem: str) -> tuple[str, str]:
    return f"was not chosen: {problem}", f"were not chosen: {problem}"


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
                usage.append((part, f"{100 * part:.3g}% full ({_resource_label(r['resource'])})"))
    return sorted(usage, reverse=True)


def _free_of_capacity_text(
    n: Mapping[str, Any], resource: Mapping[str, Any], adjective: str = ""
) -> str:
    """``7 of 8 CPUs for exclusive use``, ``512 MiB of 16 GiB of memory``."""
    unit, name = Unit(resource["unit"]), resource["resource"]
    label = "" if name == "cpu" else f" of {_resource_label(name)}"
    amounts_text = _part_text(unit, n["free"], n["capacity"])
    return f"{amounts_text}{label}{adjective}{unit.use_text}"


def _part_text(unit: Unit, free_amount: int, capacity: int) -> str:
    """``7 of 8 CPUs``, ``12 of 16 GiB``, ``512 MiB of 16 GiB``."""
    free_text = unit.amount_text_without_cpu_noun(free_amount, free=True)
    capacity_text = unit.amount_text(capacity)
    if free_text.partition(" ")[2] == capacity_text.partition(" ")[2]:
        free_text = free_text.partition(" ")[0]
    return f"{free_text} of {capacity_text}"


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
    shown = value[:_MAX_EXTERNAL_VALUE_CHARS]
    return shown if shown == value else f"{shown}…"


def _strip_subject(document: ExplanationDocument, message: str) -> str:
    """Remove the subject from a message, because the heading names it.

    Rejections are stored with the kubelet's whole message, and steps quote it.
    """
    subject = f"pod {document['namespace']}/{document['pod']}, container {document['container']}: "
    return message.replace(subject, "", 1)  # read: shown without what stands above it


def _to_sentence(clause: str) -> str:
    subject_word = clause.partition(" ")[0]
    # Code words stay as they are.
    if "/" not in subject_word and subject_word.removesuffix(":") not in _CODE_WORDS:
        clause = clause[:1].upper() + clause[1:]
    return clause if clause.endswith((".", "!", "?")) else clause + "."


def start_delay_text(seconds: float) -> str:
    """A start delay, over CRI an upper bound: ``start delay at most 12 ms: it …``.

    Seconds from when its process was made until it had what was decided.
    """
    if seconds <= 0:
        return "no start delay: its cpuset was written before it started"
    return f"start delay at most {seconds * 1000:.0f} ms: it started before its cpuset was written"


def displaced_text(cpus: str) -> str:
    """``displaced, because CPU 2 is offline; on the shared pool until it is online``."""
    online = inflect_for_ids(cpus, "it is", "one of them is")
    offline_text = cpus_text(cpus, "is", "are")
    return f"displaced, because {offline_text} offline; on the shared pool until {online} online"


def drift_text(text: str, time_text: str, owners: Sequence[str], *, is_abandoned: bool) -> str:
    """``desired 4-7, actual 0-7 since 12 s, on exclusive CPUs of shop/db/server``.

    ``time_text`` is a duration or a start time; ``is_abandoned`` means no further repairs.
    """
    holders_text = f", on exclusive CPUs of {listed_words_text(owners, 3)}" if owners else ""
    end = "; repairs are abandoned, because another program rewrites it" if is_abandoned else ""
    return f"{text} since {time_text}{holders_text}{end}"
