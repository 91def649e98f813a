"""The reference pages say what the code says: keys, values, messages, reasons, generated lists."""

import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from xml.etree import ElementTree

import click
import pytest
import yaml

from nri_numa import config
from nri_numa.cli import COMMANDS, cli
from nri_numa.config import layers
from nri_numa.controller.service import ControllerMetrics
from nri_numa.engine.request.annotations import (
    SCHEDULED_NODES_KEY,
    check_value,
    resolve_placement_options,
)
from nri_numa.engine.request.options import TABLE
from nri_numa.model.counted_containers import COUNTED_CONTAINERS_NRT_ATTRIBUTE
from nri_numa.model.offline_capacity import DRAINED_ANNOTATION, OFFLINE_CAPACITY_ANNOTATION
from nri_numa.model.reasons import Rejection, RejectionReason
from nri_numa.model.settings import Settings
from nri_numa.model.workload import Container, PodSandbox
from nri_numa.publisher.desired_objects import NODE_ANNOTATIONS, NODE_LABELS
from nri_numa.publisher.publisher import PublisherMetrics
from nri_numa.publisher.topology import (
    RELEASE_COUNTER_ANNOTATION,
    RENEWED_AT_ANNOTATION,
    VALIDITY_ANNOTATION,
    ZONE_ATTRIBUTES,
)
from nri_numa.scheduler.metrics import SchedulerMetrics
from nri_numa.scheduler.watcher import WAKE_ANNOTATION
from tests.beds.docs_pages import PAGES, page_id
from tests.checks.docs_rejections import REJECTIONS, line
from tools import docs_metrics, remedies
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


# --- Whatever the documentation names exists: commands, options, keys, metrics, files -----------


OWN_SUFFIXES = re.compile(r"_(bucket|count|sum)$")


def typed(text: str) -> Iterator[str]:
    """Whatever stands as code in a page, line by line, continued lines joined."""
    for block in re.findall(r"^```\w*\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
        yield from block.replace("\\\n", " ").splitlines()
    yield from re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    yield from re.findall(r"^    (\S.*)$", text, re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_commands_and_their_options_exist(page: Path) -> None:
    with click.Context(cli, info_name="nri-numa") as root:
        for line in typed(page.read_text()):
            for found in re.finditer(r"nri-numa ([a-z]+)\b([^|;#&→]*)", line):
                name, rest = found[1], found[2]
                if name not in COMMANDS:
                    continue  # prose, or a unit's name: `systemctl status nri-numa` and the like
                command = cli.get_command(root, name)
                assert command is not None
                known = {
                    option
                    for one in command.get_params(root)
                    for option in (*one.opts, *one.secondary_opts)
                }
                for option in re.findall(r"(?<![\w-])--?[a-z][\w-]*", rest):
                    assert option in known | {"-h"}, f"{name} {option} in: {line}"


@cache
def exposed() -> set[str]:
    """Metrics of all our processes."""
    services = (one("1") for one in (PublisherMetrics, SchedulerMetrics, ControllerMetrics))
    texts = [docs_metrics.text(), *(one.render_metrics().decode() for one in services)]
    return set(re.findall(r"nri_numa_\w+", "".join(texts)))


@cache
def environment() -> set[str]:
    """Variables of the program and of the tests."""
    tests = "".join(path.read_text() for path in (ROOT / "tests").rglob("*.py"))
    known = {*layers.config_path_by_environment_name(), *layers._COMMAND_LINE_ENVIRONMENT_NAMES}
    return known.union(re.findall(r"NRI_NUMA_[A-Z_]+[A-Z]", tests))


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_metrics_and_environment_names_exist(page: Path) -> None:
    text = page.read_text()
    for name in set(re.findall(r"\bnri_numa_\w+[a-z]\b", text)):
        assert OWN_SUFFIXES.sub("", name) in exposed(), name
    assert set(re.findall(r"\bNRI_NUMA_[A-Z_]+[A-Z]\b", text)) <= environment()


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_annotations_exist(page: Path) -> None:
    # A hyphen behind a name is how kubectl is told to remove it.
    for key in set(re.findall(r"numa\.kubernetes\.io/([a-z]+(?:-[a-z]+)*)", page.read_text())):
        if page.name != "annotations.md":  # which shows wrong ones on purpose
            assert key in (
                *TABLE.keys,
                *(
                    "assigned",
                    "slots",
                    "nri-numa",
                    "agent-state",
                    "device-counts",
                    SCHEDULED_NODES_KEY,
                    COUNTED_CONTAINERS_NRT_ATTRIBUTE,
                    WAKE_ANNOTATION,
                    DRAINED_ANNOTATION,
                ),
                *(OFFLINE_CAPACITY_ANNOTATION, *NODE_ANNOTATIONS, *NODE_LABELS, *ZONE_ATTRIBUTES),
                *(
                    "free-exclusive-cpus",
                    RELEASE_COUNTER_ANNOTATION,
                    RENEWED_AT_ANNOTATION,
                    VALIDITY_ANNOTATION,
                ),  # of a NodeResourceTopology
            ), key


def test_configurations_that_pages_show_are_sound(tmp_path: Path) -> None:
    shown = [
        block
        for page in PAGES
        for block in re.findall(r"```yaml\n(.*?)```", page.read_text(), re.DOTALL)
        if "AgentConfig" in block
    ]
    assert shown
    for block in shown:
        file = tmp_path / "agent.yaml"
        file.write_text(block)
        config.load_config(str(file))


def test_every_decision_record_is_listed() -> None:
    listed = re.findall(r"\(adr/([^)]+)\)", (DOCS / "architecture.md").read_text())
    assert sorted(set(listed)) == sorted(path.name for path in (DOCS / "adr").glob("*.md"))


@pytest.mark.parametrize("picture", sorted((DOCS / "img").glob("*.svg")), ids=page_id)
def test_drawings_say_what_they_show_and_load_nothing(picture: Path) -> None:
    tree = ElementTree.parse(picture)
    space = "{http://www.w3.org/2000/svg}"
    for name in ("title", "desc"):
        element = tree.find(f"{space}{name}")
        assert element is not None
        assert element.text
    for element in tree.iter():
        assert element.tag not in (f"{space}script", f"{space}image", f"{space}style")
        assert not any("href" in name for name in element.attrib)
