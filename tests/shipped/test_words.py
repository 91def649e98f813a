"""One word for each thing: what users read says it in the words of docs/glossary.md.

Read are the documentation without code, texts of the program of more than one word,
help, schema and API descriptions, the page, the drawings, alerts, dashboard and manifests.
Decision records and the changelog stay as they were written.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest
import yaml

from tools.docs_check import pages, prose

ROOT = Path(__file__).resolve().parents[2]

REPLACED = {
    r"own(s|ed|ers?)": "exclusive CPUs, or their holder",
    r"own CPUs?": "exclusive CPUs",
    r"(others|anybody|nobody|somebody|can|cannot|may|must|should) own": "have exclusively",
    r"CPUs?( [\d,-]+)? of (its|their|your|one's) own": "exclusive CPUs",
    r"belongs? exclusively": "exclusive to",
    r"promis(e|es|ed|ing)": "allocated",
    r"book(s|ed|ing|ings)?": "allocated",
    r"bound": "pinned",
    r"hear(s|d|ing)?": "event, or has no effect",
    r"wish(es|ed|ing)?": "requested, annotation",
    r"(…|CPUs?|memory|pages|room|more|less|most|enough) left(?! (alone|out|to)\b)": "free",
}
"""Patterns of whole words that were replaced, and what is said instead."""

HARD = {
    r"for (its|their|a) sake": "so that ...",
    r"all the same(?=[,.)]| and)": "still, or without ...",
    r"likewise": "the same",
    r"beforehand": "before",
    r"whoever|somebody( else)?('s)?": "a user who, another program",
    r"(is|are|was|were|been|until) told": "is called when, is written",
    r"not let in": "not allowed",
    r"(an annotation|which|it) speaks to": "names",
    r"is not heard|heard by nobody": "is ignored because ...",
    r"of no use|to no avail|in vain": "without effect",
}
"""Turns of phrase that a reader stumbles over whose first language is another one."""

ALLOWED = (
    ("docs/glossary.md", ".*", "lists the old words"),
    ("*", "its owner (may|only)", "the user whose file it is"),
    ("nri_numa/machine/tree.py", r"\(book\|drawer\)", "a level of s390 machines"),
    ("nri_numa/engine/*.py", "^no wish$", "a value in stored explanations"),
    ("nri_numa/engine/state.py", ".*", "broken invariants, in the words of the fields that differ"),
)
"""Files, phrases in them, and why the phrase may stay."""

NAMES = re.compile(r"\bnri_numa_\w+|\bNRINUMA\w+|\b[a-z]+[A-Z]\w*|\w+/\S+|\S+\.(md|py)\b|most-left")
"""Interfaces and files keep their names."""


def program() -> Iterator[tuple[str, str]]:
    """Texts of more than one word, and headings of tables; docstrings are for developers."""
    for path in sorted((ROOT / "nri_numa").rglob("*.py")):
        if "pb" in path.parts:
            continue
        tree = ast.parse(path.read_text())
        docstrings = {
            id(statement.value) for statement in ast.walk(tree) if isinstance(statement, ast.Expr)
        }
        for node in ast.walk(tree):
            text = ""
            if isinstance(node, ast.JoinedStr):
                parts = [
                    part.value if isinstance(part, ast.Constant) else "…" for part in node.values
                ]
                text = "".join(map(str, parts))
                docstrings |= {id(part) for part in node.values}
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                text = node.value
            if (" " in text or text.isupper()) and id(node) not in docstrings:
                line = getattr(node, "lineno", 0)
                yield f"{path.relative_to(ROOT)}:{line}", text


def documentation() -> Iterator[tuple[str, str]]:
    """Prose: no fenced and no indented code, no code in the line, no targets of links."""
    for page in pages(ROOT):
        name = str(page.relative_to(ROOT))
        if page.name == "CHANGELOG.md" or "docs/adr/" in name:
            continue
        first, paragraph = 1, ""
        for number, line in [*prose(page.read_text()), (0, "")]:
            if line.strip() and not line.startswith("    "):
                first = first if paragraph else number
                paragraph += f"{line.strip()} "
            elif paragraph:
                yield f"{name}:{first}", re.sub(r"`[^`]*`|\]\([^)]*\)", " ", paragraph)
                paragraph = ""


def described() -> Iterator[tuple[str, str]]:
    """Descriptions of the configuration and of the API, and what the dashboard says."""

    def walk(value: object, where: str) -> Iterator[tuple[str, str]]:
        if isinstance(value, dict):
            for key, inner in value.items():
                if key in ("description", "summary", "title") and isinstance(inner, str):
                    yield where, inner
                else:
                    yield from walk(inner, where)
        elif isinstance(value, list):
            for inner in value:
                yield from walk(inner, where)

    for name in (
        "config/agent.schema.json",
        "config/helm/nri-numa/values.schema.json",
        "config/grafana/nri-numa.json",
    ):
        yield from walk(json.loads((ROOT / name).read_text()), name)
    name = "nri_numa/web/openapi.yaml"
    yield from walk(yaml.safe_load((ROOT / name).read_text()), name)


def page() -> Iterator[tuple[str, str]]:
    """Texts of the page's script that are more than one word, without what is computed in them."""
    name = "nri_numa/web/static/page.js"
    text = re.sub(r"/\*.*?\*/|(?<!:)//[^\n]*", "", (ROOT / name).read_text(), flags=re.DOTALL)
    for line in text.splitlines():
        # Whole strings, and of templates what stands between the values.
        for found in re.findall(r"\"([^\"]* [^\"]*)\"|[`}]([^`${}]* [^`${}]*)(?=[`$])", line):
            yield name, re.sub(r"\w+(?=\.\w|: \d)", " ", "".join(found))
    yield from files("nri_numa/web/static/index.html")


def files(*patterns: str) -> Iterator[tuple[str, str]]:
    for pattern in patterns:
        for path in sorted(ROOT.glob(pattern)):
            for number, line in enumerate(path.read_text().splitlines(), 1):
                yield f"{path.relative_to(ROOT)}:{number}", line


def drawings() -> Iterator[tuple[str, str]]:
    for where, line in files("docs/img/*.svg"):
        for found in re.findall(r">([^<]+)</(?:text|desc|title)>", line):
            yield where, found


def shipped() -> Iterator[tuple[str, str]]:
    yield from files(
        "config/agent.yaml",
        "config/examples/*.yaml",
        "config/prometheus/*.yaml",
        "config/kubernetes/**/*.yaml",
        "config/helm/nri-numa/values.yaml",
        "config/helm/nri-numa/templates/*",
        "systemd/*",
    )


def instead(text: str) -> Iterator[str]:
    """Each such word of a text with what stands around it, and what is said instead."""
    text = NAMES.sub(" ", text)
    for pattern, other in (REPLACED | HARD).items():
        for match in re.finditer(rf"(?<!\w)(?:{pattern})\b", text, re.IGNORECASE):
            around = " ".join(text[max(0, match.start() - 50) : match.end() + 50].split())
            yield f"{match[0]!r} in {around!r}, say: {other}"


def may_stay(where: str, text: str) -> bool:
    name = where.partition(":")[0]
    return any(fnmatch(name, pattern) and re.search(phrase, text) for pattern, phrase, _ in ALLOWED)


@pytest.mark.parametrize("source", [program, documentation, described, page, drawings, shipped])
def test_no_word_stands_for_what_has_another_one(
    source: Callable[[], Iterator[tuple[str, str]]],
) -> None:
    """And sentences are understood at once."""
    texts = list(source())
    assert texts
    found = [
        f"{where}: {word}"
        for where, text in texts
        for word in instead(text)
        if not may_stay(where, text)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("it runs on CPUs 0-3 of its own", ["CPUs 0-3 of its own"]),
        ("CPUs that others own, or a container owns", ["owns", "others own"]),
        ("NUMA NODE BOUND CPU LEFT", ["BOUND", "CPU LEFT"]),
        ("which has … left", ["… left"]),
        ("an unbound container whose memory is left alone, on a terminal of its own", []),
        ("annotation heard by nobody", ["heard", "heard by nobody"]),
        ("nri_numa_neighbours_on_owned_cpus and memoryBoundBytes of strategy: most-left", []),
    ],
)
def test_old_words_are_told_from_others(text: str, words: list[str]) -> None:
    assert [word.partition("'")[2].partition("'")[0] for word in instead(text)] == words
