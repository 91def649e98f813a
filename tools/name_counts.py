"""Count names that say nothing by themselves, and docstrings that begin with a question's word.

``python -m tools.name_counts`` prints the share of each kind and fails where one is above its
limit, in the package or in a room of `MIN_ROOM_DEFINITIONS` and more; ``--list`` prints each one
with its place. A name is empty if all its words are: pronouns, prepositions, auxiliary verbs, bare
participles and adjectives, household verbs. Nobody can search for such a name, and nobody but its
author can read it away from its file.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

MAX_PERCENT: Final = {"definition": 4.0, "local": 6.0, "docstring": 3.0, "one word": 30.0}
MAX_ROOM_PERCENT: Final = {"definition": 6.0, "local": 9.0, "docstring": 5.0, "one word": 45.0}
MIN_ROOM_DEFINITIONS: Final = 100
"""Definitions of a room that is held to limits of its own; smaller ones count in the package."""
QUESTION_WORDS: Final = frozenset(
    ("what", "who", "whose", "whom", "whether", "why", "how", "where", "that", "those")
)
PACKAGE: Final = Path("nri_numa")
EMPTY_WORDS: Final = frozenset(
    """
    a an the this that these those it its one ones own each every all any some both none other
    others another such same else rest whole half thing things way we us our ours they them their
    who whom whose what which why when where how here there everywhere nobody somebody

    of on in at to by for from with without within into out up down over under off beside between
    before after behind among against since until as like than through along around away back aside
    ahead apart together alone near close far

    is are was were be been has have had having do does did done may can could will would should
    must not no never only still yet already again once now then soon later late and or but so if
    very too much many more most less least few fewer several enough first last next former latter

    say says said tell tells told ask asks asked know known think thought mean meant mean look
    looks see sees saw seen hear heard call called find finds found meet meets met lose lost come
    comes came go goes went gone going get gets got give gives gave given take takes took taken keep
    keeps kept hold holds held let lets leave leaves left put puts make makes made move moves moved
    moving stay stays stayed wait waits waiting want wanted wants need needed needs wish wished
    expect expected choose chose chosen judge judged begin begins began begun start started end ends
    ended turn turns share shares shrunk freed spared stolen emptied drained shown counted booked
    paid owed charged forget forgotten remember remembered arrive arrived act tied fixed

    right wrong good well better best bad worst poor odd plain alike equal near nearer nearest far
    wide wider widest narrow large larger largest small smaller smallest long longest short shortest
    high low deep little grown free busy quiet silent idle fresh stale open closed ready sure unsure
    soft loose new old early slow fast

    word words place places spot point piece pieces step steps sort kinds part party story mistake
    book books yes ok

    i whoever theirs anywhere elsewhere nowhere somewhere wherever beneath further might ever often
    sooner lately acts asking coming knows looked means deepest highest lowest narrowest doubtful
    unpaid desk panel pace set slack talk
    """.split()  # noqa: SIM905 - a list of a hundred lines
)
_WORD: Final = re.compile(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z]+|[A-Z]+|\d+")
_DEFINING: Final = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


class Reading(NamedTuple):
    """A name or the first line of a docstring, and whether it counts against its kind."""

    kind: str
    text: str
    line: int
    is_counted: bool


def words_of(name: str) -> list[str]:
    """Words of a name, in lower case."""
    return [word.lower() for word in _WORD.findall(name)]


def is_empty(name: str) -> bool:
    """True if every word stands for anything; a single letter is an index."""
    return len(name.strip("_")) > 1 and EMPTY_WORDS.issuperset(words_of(name))


def _assigned_names(statement: ast.stmt) -> Iterator[str]:
    """Names that a statement of a class or module defines: constants and fields."""
    if isinstance(statement, ast.Assign):
        yield from (target.id for target in statement.targets if isinstance(target, ast.Name))
    elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
        yield statement.target.id


def _local_names(function: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    """Parameters and variables of a function and of those inside it."""
    names = {one.arg for one in (*function.args.args, *function.args.kwonlyargs)}
    names |= {
        one.id
        for one in ast.walk(function)
        if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)
    }
    return names - {"self", "cls"}


def readings(tree: ast.Module) -> Iterator[Reading]:
    """Definitions without special methods, locals, and first lines of docstrings."""
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 1)
        if isinstance(node, _DEFINING) and not node.name.startswith("__"):
            yield Reading("definition", node.name, line, is_empty(node.name))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            if not node.name.startswith("__"):
                yield Reading("one word", node.name, line, len(words_of(node.name)) == 1)
            for name in sorted(_local_names(node)):
                yield Reading("local", name, line, is_empty(name))
        if isinstance(node, ast.ClassDef | ast.Module):
            for statement in node.body:
                for name in _assigned_names(statement):
                    yield Reading("definition", name, statement.lineno, is_empty(name))
        if isinstance(node, (*_DEFINING, ast.Module)):
            text = ast.get_docstring(node)
            if text is not None:
                first = text.split()[0].lower().strip(",.:`")
                yield Reading("docstring", text.splitlines()[0], line, first in QUESTION_WORDS)


def main() -> int:
    """Print the shares; 1 where one is above its limit."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--list", action="store_true", help="each one, with its place")
    is_listing = options.parse_args().list
    counts: dict[str, Counter[str]] = {}
    counted: dict[str, Counter[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        if "pb" in path.parts:
            continue
        room = path.relative_to(PACKAGE).parts[0]
        for one in readings(ast.parse(path.read_text(encoding="utf-8"))):
            for group in (room, ""):
                counts.setdefault(group, Counter())[one.kind] += 1
                counted.setdefault(group, Counter())[one.kind] += one.is_counted
            if is_listing and one.is_counted:
                print(f"{path}:{one.line} {one.kind}: {one.text}")
    problems = []
    for group, numbers in sorted(counts.items()):
        if group and numbers["definition"] < MIN_ROOM_DEFINITIONS:
            continue
        for kind, limit in (MAX_ROOM_PERCENT if group else MAX_PERCENT).items():
            number = counted[group][kind]
            percent = 100 * number / max(1, numbers[kind])
            text = f"{group or PACKAGE}, {kind}: {number} of {numbers[kind]}, {percent:.1f} %"
            if not group:
                print(text)
            if percent > limit:
                problems.append(f"{text}, expected at most {limit} %")
    print(*problems, sep="\n", end="\n" if problems else "")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
