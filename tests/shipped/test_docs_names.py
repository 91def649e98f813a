"""Whatever the documentation names exists: commands, options, keys, metrics, files."""

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from xml.etree import ElementTree

import click
import pytest

from nri_numa import config
from nri_numa.cli import COMMANDS, cli
from nri_numa.config import layers
from nri_numa.controller.service import ControllerMetrics
from nri_numa.engine.request.annotations import SCHEDULED_NODES_KEY
from nri_numa.engine.request.options import TABLE
from nri_numa.model.counted_containers import COUNTED_CONTAINERS_NRT_ATTRIBUTE
from nri_numa.model.offline_capacity import DRAINED_ANNOTATION, OFFLINE_CAPACITY_ANNOTATION
from nri_numa.publisher.desired_objects import NODE_ANNOTATIONS, NODE_LABELS
from nri_numa.publisher.publisher import PublisherMetrics
from nri_numa.publisher.topology import (
    RELEASE_COUNTER_ANNOTATION,
    RENEWED_AT_ANNOTATION,
    VALIDITY_ANNOTATION,
    ZONE_ATTRIBUTES,
)
from nri_numa.scheduler.extender import SchedulerMetrics
from nri_numa.scheduler.watcher import WAKE_ANNOTATION
from tests.beds.docs_pages import PAGES, page_id
from tools import docs_metrics
from tools.docs_regions import DOCS

ROOT = DOCS.parent
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
