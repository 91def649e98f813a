"""The reference pages say what the code says: keys, values, messages, reasons, generated lists."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from nri_numa.cli import COMMANDS
from nri_numa.engine.request.annotations import check_value, resolve_placement_options
from nri_numa.engine.request.options import TABLE
from nri_numa.model.reasons import Rejection, RejectionReason
from nri_numa.model.settings import Settings
from nri_numa.model.workload import Container, PodSandbox
from tests.checks.docs_rejections import REJECTIONS, line
from tools import remedies
from tools.docs_reasons import MEANING_AND_REMEDY
from tools.docs_regions import DOCS, generators, replaced
from tools.openapi import describe

ROOT = DOCS.parent
PAIRS = re.compile(r"```yaml\n(.*?)```\n\n```text\n(.*?)```", re.DOTALL)


def page(name: str) -> str:
    return (DOCS / name).read_text()


def words(text: str) -> str:
    """The text on one line: pages break lines, messages do not."""
    return " ".join(text.split())


def sections(text: str, level: str) -> dict[str, str]:
    """By heading, what stands below it."""
    parts = re.split(rf"^{level} (.+)$", text, flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


def test_the_pages_remedies_are_those_of_the_documentation() -> None:
    """``python -m tools.remedies`` brings them up to date."""
    assert remedies.PAGE.read_text() == remedies.text()


def test_every_reason_to_reject_has_a_remedy_beside_the_page() -> None:
    for reason in RejectionReason:
        assert f'<section id="{reason.lower()}" class="card">' in remedies.text()


@pytest.mark.parametrize(
    ("name", "tool", "text"), generators(), ids=[name for name, _, _ in generators()]
)
def test_generated_parts_are_fresh(name: str, tool: str, text: Callable[[], str]) -> None:
    """``python -m tools.docs_regions`` brings them up to date."""
    assert page(name) == replaced(page(name), tool, text()), "run python -m tools.docs_regions"


def test_every_command_and_path_has_its_place() -> None:
    assert set(COMMANDS) <= set(sections(page("cli.md"), "##"))
    for path in describe()["paths"]:
        assert f"`{path}`" in page("http-api.md")


# --- annotations ------------------------------------------------------------------------------


def test_every_annotation_key_is_described_and_no_other() -> None:
    keys = sections(page("annotations.md"), "##")["Keys"]
    assert tuple(sections(keys, "###")) == TABLE.keys


@pytest.mark.parametrize("key", ["numacpu", "numamem", "load"])
def test_example_values_are_accepted(key: str) -> None:
    row = re.search(rf"^\| \[`{key}`\].*$", page("annotations.md"), re.MULTILINE)
    assert row is not None
    examples = re.findall(r"`([^`]+)`", row[0].split(" | ")[2])
    assert examples
    for value in examples:
        assert check_value(key, value) is None, value


def wrong() -> list[tuple[dict[str, str], str]]:
    """Annotations and the message that the page shows for them."""
    part = sections(page("annotations.md"), "##")["Mistakes"]
    return [(yaml.safe_load(given), words(shown)) for given, shown in PAIRS.findall(part)]


@pytest.mark.parametrize(("given", "shown"), wrong(), ids=lambda one: str(one)[:40])
def test_a_wrong_annotation_reads_as_the_page_says(given: dict[str, str], shown: str) -> None:
    pod = PodSandbox(id="p", uid="u", namespace="default", name="web", annotations=given)
    found = resolve_placement_options(Settings(), pod, Container(id="c", pod_id="p", name="app"))
    assert isinstance(found, Rejection)
    assert f"pod default/web, container app: {found.detail}" == shown


# --- refusals ---------------------------------------------------------------------------------


def test_every_reason_is_described_and_no_other() -> None:
    described = sections(sections(page("troubleshooting.md"), "##")["Reasons"], "###")
    assert sorted(described) == sorted(RejectionReason) == sorted(MEANING_AND_REMEDY)


def test_the_other_words_of_a_failed_creation_are_described() -> None:
    source = Path(ROOT / "nri_numa/agent/handler.py").read_text()
    found = set(re.findall(r"RequestRejected\(\s*f?\"([A-Z]\w+):", source))
    assert found
    for word in found:
        assert f"`{word}`" in page("troubleshooting.md")


@pytest.mark.parametrize("reason", sorted(REJECTIONS))
def test_the_example_of_a_reason_is_what_the_engine_says(reason: str) -> None:
    rejected = REJECTIONS[reason]()
    assert rejected.reason == reason
    text = sections(sections(page("troubleshooting.md"), "##")["Reasons"], "###")[reason]
    shown = re.search(r"```text\n(.*?)```", text, re.DOTALL)
    assert shown is not None
    assert words(shown[1]) == line(rejected)
