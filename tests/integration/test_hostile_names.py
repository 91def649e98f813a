"""Names that nobody means well by, from the pod to everything that shows it.

Kubernetes would take few of them as names, and annotations and other runtimes take all. What a
channel must not carry is the same everywhere: control characters, direction marks, line breaks.
The page has its own test in a browser, and `tests/shipped/test_kubectl_plugin.py` is beside it.
"""

import io
import json
import urllib.request
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner, Result

from nri_numa.cli import cli
from nri_numa.kube import events
from nri_numa.observe import logs
from nri_numa.publisher import desired_objects
from nri_numa.web.responses import Assignments, Notices
from tests.beds.page_bed import PageBed
from tests.machines import named as machines

NAMES = {
    "a terminal's title": "\x1b]0;x\x07\x1b[2J",
    "a terminal in eight bits": "\x9b31m",
    "another direction": "\u202ea\u2066",
    "no width": "a\u200b\u200d\ufeffb",
    "markup": "'\"><script>alert(1)<\\script>&amp;",
    "lines": "a\nb\r\n\u2028\u2029\x85c",
    "a zero": "a\0b",
    "an option": "--api=x",
    "another folder": "..",
    "an escaped path": "%2e%2e%00",
    "a template": "${x}{{y}}%s%n{0}",
    "no character": "\ufffe\uffff",
    "much": "x" * 65536,
    "much that grows": "\x1b" * 65536,
}
SHORT = {what: name for what, name in NAMES.items() if len(name) < 100}
LOG = io.StringIO()


@pytest.fixture(scope="module")
def bed() -> Iterator[PageBed]:
    """An agent that has met each of them as every name there is, as key and as value."""
    LOG.truncate(0)
    logs.setup_logging("info", stream=LOG)
    made = PageBed(machines.dual_smt(cores_per_numa=40))
    try:
        for name in NAMES.values():
            made.create(name, name, namespace=name, policy="single-numa-node")
            made.create(f"{name}-list", name, namespace=name, numacpu=name)
            made.create(f"{name}-policy", name, namespace=name, policy=name)
            made.create(f"{name}-key", name, namespace=name, **{name: name})
        yield made
    finally:
        made.close()
        logs.setup_logging("info", stream=io.StringIO())


def got(bed: PageBed, path: str) -> str:
    with urllib.request.urlopen(f"{bed.url}{path}", timeout=30) as answer:
        return bytes(answer.read()).decode()


def asked(bed: PageBed, command: str, *words: str) -> Result:
    address = f"--api={bed.address[0]}:{bed.address[1]}"
    return CliRunner().invoke(cli, [command, address, *words])


def clean(text: str) -> bool:
    """Nothing but what can be read, in lines."""
    return all(line.isprintable() for line in text.split("\n"))


@pytest.mark.parametrize(
    "path", ["status", "assignments", "rejections", "notices", "use", "kubelet"]
)
def test_documents_are_json_and_say_what_it_was(bed: PageBed, path: str) -> None:
    document = json.loads(got(bed, f"v1/{path}"))
    if path in ("assignments", "rejections"):
        rows: list[dict[str, Any]] = document[{"assignments": "containers"}.get(path, path)]
        assert {row["namespace"] for row in rows} <= set(NAMES.values())
        assert len(rows) >= len(NAMES)


def test_log_and_metrics_hold_nothing_to_obey(bed: PageBed) -> None:
    assert clean(got(bed, "metrics"))
    told = LOG.getvalue()
    assert len(told.splitlines()) > len(NAMES)
    assert clean(told)


@pytest.mark.parametrize("what", SHORT)
@pytest.mark.parametrize("form", ["table", "json", "yaml"])
def test_explain_finds_it_and_shows_it_harmlessly(bed: PageBed, what: str, form: str) -> None:
    name = SHORT[what]
    for pod in (name, f"{name}-list"):
        done = asked(bed, "explain", "-o", form, "--", f"{name}/{pod}", name)
        assert done.exit_code in (0, 1), done.output  # 1: it is a refusal that is explained
        assert done.exception is None or isinstance(done.exception, SystemExit)
        assert clean(done.output), done.output
        if form == "json" and done.exit_code == 0:
            assert json.loads(done.output)["explanations"][0]["pod"] == pod


@pytest.mark.parametrize("form", ["table", "wide", "name", "json", "yaml"])
def test_status_is_harmless_in_every_form(bed: PageBed, form: str) -> None:
    done = asked(bed, "status", "-o", form)
    assert done.exit_code == 0, done.output[-2000:]
    assert clean(done.output)


def test_a_name_that_is_no_text_is_a_mistake_of_usage(bed: PageBed) -> None:
    """Bytes of a command line that are no UTF-8 come as halves of pairs."""
    done = asked(bed, "explain", "shop/a\udcffb")
    assert (done.exit_code, isinstance(done.exception, SystemExit)) == (2, True)
    assert "is not a name, expected UTF-8" in done.output
    assert clean(done.output)


def test_what_the_publisher_makes_of_them_is_one_harmless_line(bed: PageBed) -> None:
    notices = msgspec.json.decode(got(bed, "v1/notices?after=0"), type=Notices).notices
    assert len(notices) >= len(NAMES)
    for notice in notices:
        event = desired_objects.build_event(notice, prefix="numa.kubernetes.io", node="n1")
        assert event["note"].isprintable()
        assert len(event["note"].encode()) <= events.MAX_EVENT_NOTE_BYTES
        assert len(event["metadata"]["name"]) <= events.MAX_EVENT_NAME_CHARS
    containers = msgspec.json.decode(got(bed, "v1/assignments"), type=Assignments).containers
    texts = desired_objects.pod_annotations(containers)
    assert len(texts) >= len(NAMES)
    for _, text in texts.values():
        assert text.isprintable()
        assert text.isascii()
