"""What tests cost, read from the JUnit files of the last run: `make slow`."""

import collections
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path("artifacts/tests")
MERGED = Path("artifacts/tests.xml")


@dataclass(frozen=True)
class Result:
    """One test of one run."""

    run: str
    name: str
    seconds: float
    outcome: str
    again: int = 0
    why: str = ""  # what a failed test raised, shortened

    @property
    def folder(self) -> str:
        """``unit/engine`` of a unit test, else the folder below ``tests``.

        A module that could not be imported has no class: its name is what pytest gives the test.
        """
        module, test = self.name.split("::", 1)
        parts = (module or test).split(".")[1:]
        return "/".join(parts[:2] if parts[:1] == ["unit"] else parts[:1])


def read(folder: Path = FOLDER) -> list[Result]:
    """All results, which are merged into ``artifacts/tests.xml`` as well."""
    results = []
    merged = ElementTree.Element("testsuites")
    for file in sorted(folder.glob("*.xml")):
        root = ElementTree.parse(file).getroot()  # pytest wrote it
        merged.extend(root.iter("testsuite"))
        results += [_result(file.stem, case) for case in root.iter("testcase")]
    ElementTree.ElementTree(merged).write(MERGED, encoding="utf-8")
    return results


def _result(run: str, case: ElementTree.Element) -> Result:
    outcome = "passed"
    why = ""
    raised = case.find("failure")
    if raised is None:
        raised = case.find("error")
    if raised is not None:
        outcome = "failed"
        why = " ".join(raised.get("message", "").split())[:300]
    elif case.find("skipped") is not None:
        outcome = "skipped"
    again = [
        each.get("value", "0") for each in case.iter("property") if each.get("name") == "again"
    ]
    name = f"{case.get('classname')}::{case.get('name')}"
    return Result(run, name, float(case.get("time", "0")), outcome, sum(map(int, again)), why)


def counted(results: Iterable[Result]) -> collections.Counter[str]:
    """How many passed, failed and were skipped."""
    return collections.Counter(each.outcome for each in results)


def tried_again(results: Iterable[Result]) -> int:
    """How many second tries there were."""
    return sum(each.again for each in results)


def report(results: Iterable[Result], most: int = 30) -> str:
    """The sums by folder and run, and the slowest tests."""
    seconds: collections.Counter[tuple[str, str]] = collections.Counter()
    tests: collections.Counter[tuple[str, str]] = collections.Counter()
    for each in results:
        seconds[each.folder, each.run] += each.seconds  # type: ignore[assignment]  # of floats
        tests[each.folder, each.run] += 1
    lines = [f"{'seconds':>8} {'tests':>6}  folder, run"]
    lines += [
        f"{took:8.1f} {tests[key]:6}  {key[0]}, {key[1]}" for key, took in seconds.most_common()
    ]
    lines.append(f"the {most} slowest:")
    slowest = sorted(results, key=lambda each: -each.seconds)[:most]
    lines += [f"{each.seconds:8.1f}  {each.name}" for each in slowest]
    return "\n".join(lines)


if __name__ == "__main__":
    found = read()
    if not found:
        sys.exit(f"no results in {FOLDER}: run make test or make test-all first")
    print(report(found))
