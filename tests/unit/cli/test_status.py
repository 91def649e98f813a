"""``nri-numa status`` in pipes, on narrow terminals, and for programs."""

import json
from itertools import pairwise
from typing import Any

import pytest
from msgspec.structs import replace

from tests.beds.cli import Columns, invoke
from tests.beds.http_view import FakeView, assignment

LONG = "checkout-service-with-a-long-name-7d4b9c6f5d-x2x1z"
IDS = "0-3,8-11,16-19,24-27,32-35,40-43,48-51,56-59"

Agent = tuple[str, FakeView]


@pytest.fixture
def crowded(agent: Agent) -> str:
    """An agent with a pod that no 80 columns hold; its address."""
    agent[1].containers = [
        replace(assignment(1), pod=LONG, cpus=IDS, policy="single-numa-node", qos="Guaranteed"),
        replace(assignment(2), policy="single-numa-node", migration="from NUMA node 1 to 0"),
    ]
    return agent[0]


def test_a_pipe_gets_every_word_whole(crowded: str) -> None:
    output = invoke("status", "--api", crowded).output
    assert output.count("single-numa-node") == 2
    (row,) = (line for line in output.splitlines() if LONG in line)
    assert IDS in row.split()
    assert "…" not in output
    assert "START DELAY" not in output  # over NRI nobody is
    assert ": its memory migrates from NUMA node 1 to 0\n" in output


@pytest.mark.parametrize("width", [40, 60, 80])
def test_a_pipe_that_says_how_wide_it_is_is_a_terminal(
    crowded: str, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    """As with ``watch``, and never with a column of single letters."""
    monkeypatch.setenv("COLUMNS", str(width))
    output = invoke("status", "--api", crowded).output
    assert "(columns not shown: MEMS, POLICY, AGE; -o wide shows all)" in output
    head = next(line for line in output.splitlines() if line.startswith("NAMESPACE"))
    starts = [head.index(title) for title in head.split()]
    assert min(b - a for a, b in pairwise(starts)) >= 8
    assert len(head) <= max(width, 60)
    monkeypatch.setenv("COLUMNS", "nonsense")
    assert LONG in invoke("status", "--api", crowded).output


def test_a_terminal_leaves_columns_out_whole_and_says_so(crowded: str, terminal: Columns) -> None:
    output = invoke("status", "--api", crowded).output
    assert max(map(len, output.splitlines())) <= 80
    assert "(columns not shown: MEMS, POLICY, AGE; -o wide shows all)" in output
    assert "single-numa" not in output
    assert "…" not in output
    terminal(200)
    output = invoke("status", "--api", crowded).output
    assert "no room" not in output
    assert LONG in output


def test_wide_shows_every_column_in_any_terminal(crowded: str, terminal: Columns) -> None:
    terminal(40)
    output = invoke("status", "-o", "wide", "--api", crowded).output
    (row,) = (line for line in output.splitlines() if LONG in line)
    for word in (IDS, "single-numa-node", "Guaranteed", "256 MiB", "emptiest", f"{1:064x}"):
        assert word in row


@pytest.mark.parametrize(
    ("title", "of_the_containers", "cells"),
    [
        ("START DELAY", [{"start_delay": 0.0124}, {"start_delay": 0.0}, {}], ["12 ms", "no", "?"]),
        ("MEMPOLICY", [{"mempolicy": "interleave"}, {}], ["interleave", "-"]),
        ("NOW RESERVED", [{"reserved": "0-1"}, {}], ["0-1", "-"]),
    ],
)
def test_a_column_is_there_where_a_container_has_it(
    agent: Agent, title: str, of_the_containers: list[dict[str, Any]], cells: list[str]
) -> None:
    agent[1].containers = [assignment(1), assignment(2)]
    assert title not in invoke("status", "-o", "wide", "--api", agent[0]).output
    agent[1].containers = [
        replace(assignment(n), **has) for n, has in enumerate(of_the_containers, 1)
    ]
    agent[1].serial += 1
    output = invoke("status", "-o", "wide", "--api", agent[0]).output
    head, *rows = (line for line in output.splitlines() if title in line or "pod-" in line)
    at = head.index(title)
    assert [row[at:].split("  ")[0].strip() for row in rows] == cells


def test_names_are_what_explain_takes(agent: Agent) -> None:
    agent[1].containers = [assignment(1), assignment(1, "sidecar"), assignment(2)]
    output = invoke("status", "-o", "name", "--api", agent[0]).output
    assert output == "shop/pod-1\ninfra/pod-2\n"
    for name in output.split():
        assert invoke("explain", name, "--api", agent[0]).exit_code == 0


@pytest.mark.parametrize(
    ("narrowed", "rejected", "containers", "empty"),
    [
        (["-n", "shop"], 1, 1, ""),
        (["-n", "infra"], 0, 1, ""),
        (["-A"], 1, 2, ""),
        (["--pod", "greedy"], 1, 0, "No containers of pod greedy."),
        (["--pod", "pod-2"], 0, 1, ""),
        (["-n", "nowhere"], 0, 0, "No containers in namespace nowhere."),
        (["-n", "shop", "--pod", "x"], 0, 0, "No containers of pod x in namespace shop."),
    ],
)
def test_rejections_are_narrowed_as_containers_are(
    agent: Agent, narrowed: list[str], rejected: int, containers: int, empty: str
) -> None:
    output = invoke("status", *narrowed, "--api", agent[0]).output
    assert ("Recent rejections" in output) is bool(rejected)
    assert len([line for line in output.splitlines() if " 202 " in line]) == rejected
    assert empty in output
    document = json.loads(invoke("status", *narrowed, "-o", "json", "--api", agent[0]).output)
    assert len(document["rejections"]) == rejected
    assert len(document["containers"]) == containers


@pytest.mark.usefixtures("terminal")
def test_more_rejections_than_a_terminal_wants_are_counted_there(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    (one,) = agent[1].list_rejections()
    many = [replace(one, pod=f"p{n}") for n in range(12)]
    monkeypatch.setattr(agent[1], "list_rejections", lambda: many)
    output = invoke("status", "--api", agent[0]).output
    assert "Recent rejections (12)" in output
    assert "and 2 more; -o wide shows all" in output
    assert " p11 " not in output
    assert " p11 " in invoke("status", "-o", "wide", "--api", agent[0]).output


def test_a_json_watch_is_a_document_a_line(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    """One for each change; that nobody answers goes to standard error."""
    address, view = agent

    def between_two_looks(_seconds: float) -> None:
        looks.append(view.serial)
        if len(looks) == 2:
            view.changed()
            view.containers = [assignment(3)]
        if len(looks) > 3:
            raise KeyboardInterrupt

    looks: list[int] = []
    monkeypatch.setattr("nri_numa.cli.status.time.sleep", between_two_looks)
    result = invoke("status", "-w", "-o", "json", "--api", address, code=0)
    documents = [json.loads(line) for line in result.stdout.splitlines()]
    assert [d["serial"] for d in documents] == [7, 8]
    assert [c["pod"] for c in documents[1]["containers"]] == ["pod-3"]
    looks[:] = [0] * 3
    result = invoke("status", "-w", "-o", "json", "--api", "127.0.0.1:1")
    assert result.stdout == ""
    assert "(retrying)" in result.stderr
