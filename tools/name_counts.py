"""Count definitions whose names say nothing by themselves, and functions of one word.

``python -m tools.name_counts`` prints both shares and fails where one is above its limit;
``--list`` prints each name with its place. A name is empty if all its words are: pronouns,
prepositions, auxiliary verbs, bare participles and adjectives, household verbs. Nobody can search
for such a name, and nobody but its author can read it away from its file.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

MAX_EMPTY_PERCENT: Final = 4.0
MAX_ONE_WORD_PERCENT: Final = 30.0
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
    """.split()  # noqa: SIM905 - a list of a hundred lines
)
_WORD: Final = re.compile(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z]+|[A-Z]+|\d+")


class Definition(NamedTuple):
    """A name with its place; methods and nested functions are functions."""

    name: str
    path: Path
    line: int
    is_function: bool

    @property
    def words(self) -> list[str]:
        """In lower case."""
        return [word.lower() for word in _WORD.findall(self.name)]

    @property
    def is_empty(self) -> bool:
        """True if every word stands for anything; a single letter is an index."""
        return len(self.name.strip("_")) > 1 and EMPTY_WORDS.issuperset(self.words)


def definitions(path: Path) -> Iterator[Definition]:
    """Functions, classes, module constants and fields of a file; no special methods."""
    for node in ast.walk(ast.parse(path.read_text())):
        is_class = isinstance(node, ast.ClassDef)
        if isinstance(
            node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
        ) and not node.name.startswith("__"):
            yield Definition(node.name, path, node.lineno, not is_class)
        if isinstance(node, ast.ClassDef | ast.Module):
            for statement in node.body:
                targets = (
                    statement.targets
                    if isinstance(statement, ast.Assign)
                    else [statement.target]
                    if isinstance(statement, ast.AnnAssign)
                    else []
                )
                for target in targets:
                    if isinstance(target, ast.Name):
                        yield Definition(target.id, path, statement.lineno, False)


def main() -> int:
    """Print both shares; 1 where one is above its limit."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--list", action="store_true", help="each name, with its place")
    paths = [path for path in sorted(PACKAGE.rglob("*.py")) if "pb" not in path.parts]
    found = [one for path in paths for one in definitions(path)]
    functions = [one for one in found if one.is_function]
    counts = (
        ("empty", [one for one in found if one.is_empty], found, MAX_EMPTY_PERCENT),
        (
            "of one word",
            [one for one in functions if len(one.words) == 1],
            functions,
            MAX_ONE_WORD_PERCENT,
        ),
    )
    is_exceeded = False
    listed = options.parse_args().list
    for text, some, names, limit in counts:
        percent = 100 * len(some) / len(names)
        is_exceeded |= percent > limit
        print(f"names {text}: {len(some)} of {len(names)}, {percent:.1f} % (at most {limit} %)")
        for one in some if listed else ():
            print(f"{one.path}:{one.line} {one.name}")
    return int(is_exceeded)


if __name__ == "__main__":
    sys.exit(main())
