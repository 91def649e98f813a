"""The page of the cluster over HTTP: its document, who may read it, and what it costs."""

import asyncio
import http.client
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from msgspec.structs import replace

from nri_numa.cluster.cluster_state import ClusterState
from nri_numa.cluster.pod_reader import PodReader
from nri_numa.config import AgentConfig, validate_config
from nri_numa.config.sections import ClusterPageSection as Section
from nri_numa.config.sections import Controller
from nri_numa.controller.overview import Overview, parse_query
from nri_numa.scheduler.candidates import VerdictCache
from tests.beds.cluster_page import ClusterPage, cluster_page
from tests.beds.objects import PREFIX, topology

TOKEN = "0123456789abcdef0123456789abcdef"


@pytest.fixture
def bed() -> Iterator[ClusterPage]:
    with cluster_page() as made:
        yield made


def ask(
    bed: ClusterPage, path: str = "/v1/cluster", **headers: str
) -> tuple[int, dict[str, str], bytes]:
    address = urlsplit(bed.url).netloc
    connection = http.client.HTTPConnection(address, timeout=60)
    try:
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read()
    finally:
        connection.close()


def document(bed: ClusterPage, query: str = "") -> Any:
    status, _, body = ask(bed, f"/v1/cluster?{query}")
    assert status == 200, body
    return json.loads(body)


def names(found: Any) -> list[str]:
    return [one["name"] for one in found["nodes"]]


def test_what_nodes_publish_is_shown(bed: ClusterPage) -> None:
    status, _, body = ask(bed)
    assert (status, b"the nodes are not known yet" in body) == (503, True), "before the first list"
    zone = {f"{PREFIX}/capacity-factor": "0.5"}
    bed.tell(
        topology(8, 4, name="b", zone=zone),
        topology(16, 16, name="a", attributes={f"{PREFIX}/agent-state": "not-ready"}),
        {"metadata": {"name": "c"}},
        drained={"b": "1"},
    )
    found = document(bed)
    assert names(found) == ["a", "b", "c"]
    assert found["total"] == {
        "nodes": 3,
        "unknownNodes": 1,
        "exclusiveCpus": 64,
        "freeExclusiveCpus": 44,
        "maxExclusiveRequest": 16,
        "fragmentation": 0.143,
        "drainedNumaNodes": 1,
        "states": {"unknown": 1, "not-ready": 1, "drained": 1},
    }
    a, b, c = found["nodes"]
    assert (a["agentReady"], b["agentReady"]) == (False, True)
    assert b["zones"][1] == {
        "id": 1,
        "exclusiveCpus": 16,
        "freeExclusiveCpus": 4,
        "memoryBytes": 32 << 30,
        "freeMemoryBytes": 32 << 30,
        "capacityFactor": 0.5,
        "drained": True,
    }
    assert b["fragmentation"] == 0.333
    assert b["feasible"] is None
    problem = "no NodeResourceTopology object for this node"
    assert (c["zones"], c["fragmentation"], c["problem"]) == ([], 0, problem)


def test_who_fits_comes_first_and_says_where(bed: ClusterPage) -> None:
    bed.tell(
        topology(8, 12, name="a"),
        topology(16, 16, name="b"),
        topology(4, 4, name="c"),
        {"metadata": {"name": "d"}},
    )
    found = document(bed, "cpus=12&memory=1Gi")
    assert found["feasibleNodes"] == 2
    assert names(found) == ["b", "a", "c", "d"], "b keeps more of its NUMA node"
    assert [one["feasible"] for one in found["nodes"]] == [True, True, False, False]
    assert found["nodes"][1]["numaNodes"] == "1"
    assert found["nodes"][2]["reason"] == (
        "needs 12 exclusive CPUs on one NUMA node; at most 4 free for exclusive use"
    )
    assert names(document(bed, "cpus=12&fittingOnly=true")) == ["b", "a"]
    assert names(document(bed, "cpus=8&policy=best-effort&fittingOnly=true")) == ["b", "a", "c"]
    assert document(bed, "cpus=20")["feasibleNodes"] == 0
    assert document(bed, "cpus=20&policy=restricted")["feasibleNodes"] == 2
    assert document(bed, "memory=64Gi")["feasibleNodes"] == 0


def test_where_no_numa_node_is_chosen_none_is_shown(bed: ClusterPage) -> None:
    bed.tell(topology(8, 8, name="a"))
    (found,) = document(bed, "memory=1Gi&policy=none")["nodes"]
    assert (found["feasible"], found["numaNodes"]) == (True, "")


def test_a_nodes_page_is_at_its_internal_address() -> None:
    def node(name: str, address: str) -> dict[str, Any]:
        there = {"ExternalIP": "198.51.100.7", "InternalIP": address, "Hostname": name}
        addresses = [{"type": kind, "address": text} for kind, text in there.items()]
        return {**topology(8, name=name), "status": {"addresses": addresses}}

    with cluster_page(node_url="http://{address}:9890") as bed:
        bed.tell(node("a", "10.0.0.7"), node("b", "fd00::7"), topology(8, name="c"))
        pages = [one["page"] for one in document(bed)["nodes"]]
    assert pages == ["http://10.0.0.7:9890", "http://[fd00::7]:9890", ""]


async def test_others_have_their_turn_while_a_wide_pod_is_judged() -> None:
    """After a few merges, and not after a hundred nodes."""
    config, nodes, turns = AgentConfig(), ClusterState(PREFIX), 0
    overview = Overview(config, nodes, VerdictCache(nodes, config.strategy), PodReader(config))
    for n in range(200):
        free = (8, 8, 8, n % 8)
        nodes.update_topology(f"n{n}", topology(*free, memory=[4 + n // 8] * 4), 0.0)

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    found = await overview.overview_document(parse_query({"cpus": "12", "policy": "best-effort"}))
    counting.cancel()
    assert found["feasibleNodes"] == 200
    assert turns >= 20


def test_thousands_are_given_in_parts(bed: ClusterPage) -> None:
    bed.tell(*(topology(n % 17, name=f"n{n:04}") for n in range(1200)))
    found = document(bed)
    assert (len(found["nodes"]), found["matchingNodes"]) == (200, 1200)
    found = document(bed, "offset=1100&limit=500")
    assert (len(found["nodes"]), found["offset"]) == (100, 1100)
    assert names(document(bed, "name=0999")) == ["n0999"]
    assert names(document(bed, f"name={'x' * 253}")) == []
    assert document(bed, "offset=5000")["nodes"] == []
    found = document(bed, "grid=true&sort=free&node=n0007&limit=1")
    assert names(found) == ["n0007"]
    assert [len(found["grid"]), found["grid"][0]["name"]] == [1200, "n0016"]
    assert document(bed)["grid"] == []
    assert len(ask(bed, "/v1/cluster?limit=500")[2]) < 1 << 20


def test_what_did_not_change_is_not_sent_again(bed: ClusterPage) -> None:
    bed.tell(topology(8, name="a"))
    _, headers, _ = ask(bed)
    tag = headers["ETag"]
    assert ask(bed, **{"If-None-Match": tag})[::2] == (304, b"")
    assert ask(bed, "/v1/cluster?cpus=1", **{"If-None-Match": tag})[0] == 200
    bed.tell(topology(8, name="a"))
    assert ask(bed, **{"If-None-Match": tag})[0] == 304, "the same again is no change"
    bed.lose("no answer")
    assert json.loads(ask(bed, **{"If-None-Match": tag})[2])["stale"] == "no answer"
    bed.lose("")
    bed.tell(topology(7, name="a"))
    assert ask(bed, **{"If-None-Match": tag})[0] == 200
    bed.forget("a")
    assert names(document(bed)) == []


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ("cpus=-1", "cpus is '-1', expected a whole number up to 4096"),
        ("cpus=1e3", "expected a whole number"),
        ("cpus=999999", "up to 4096"),
        ("limit=501", "up to 500"),
        ("memory=much", "memory is 'much'"),
        ("memory=-1", "memory is '-1'"),
        ("policy=any", "expected one of none"),
        ("sort=size", "sort is 'size', expected one of name, free, fragmentation, problems"),
        (
            "state=ill",
            "state is 'ill', expected one of unknown, not-ready, drained, reduced-capacity",
        ),
        (f"node={'x' * 300}", "node has 300 characters, expected at most 253"),
        (f"name={'x' * 300}", "at most 253"),
        ("everything=1", "unknown, expected one of cpus"),
    ],
)
def test_what_cannot_be_asked_is_said(bed: ClusterPage, query: str, said: str) -> None:
    bed.tell(topology(8, name="a"))
    status, _, body = ask(bed, f"/v1/cluster?{query}")
    assert status == 400
    assert said in json.loads(body)["error"]


def test_objects_that_nobody_can_read_are_shown_as_such(bed: ClusterPage) -> None:
    broken = topology(8, name="a")
    broken["zones"][0]["resources"][0]["available"] = "much"
    without_memory = topology(8, name="b")
    del without_memory["zones"][0]["resources"][1]
    bed.tell(broken, without_memory, drained={"b": "all of them"})
    a, b = document(bed, "cpus=1&name=")["nodes"][::-1]
    assert (a["name"], a["feasible"], a["zones"]) == ("a", False, [])
    assert "much" in a["problem"]
    assert (b["drainedNumaNodes"], b["zones"][0]["memoryBytes"]) == ("", 0)


def test_the_files_of_the_page_and_no_others(bed: ClusterPage) -> None:
    for name, kind in (
        ("", "text/html"),
        ("cluster.js", "text/javascript"),
        ("page.css", "text/css"),
    ):
        status, headers, body = ask(bed, f"/cluster/{name}")
        assert (status, headers["Content-Type"].partition(";")[0]) == (200, kind)
        assert "default-src 'none'" in headers["Content-Security-Policy"]
        assert body
    assert ask(bed, "/cluster")[0] == 308
    for path in ("/cluster/page.js", "/cluster/..%2f..%2fpage.py", "/cluster/%00"):
        assert ask(bed, path)[0] == 404


def test_a_token_of_its_own_and_no_other_name(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(TOKEN)
    with cluster_page(file) as bed:
        bed.tell(topology(8, name="a"))
        assert ask(bed)[0] == 401
        assert ask(bed, Authorization="Bearer another-0123456789abcdef")[0] == 401
        given = {"Authorization": f"Bearer {TOKEN}"}
        assert ask(bed, **given)[0] == 200
        # Somebody else's web page under a name that leads to loopback.
        assert ask(bed, Host="evil.example", **given)[0] == 421
        assert TOKEN.encode() not in ask(bed, **given)[2]
        assert ask(bed, "/cluster/")[0] == 200, "the page itself holds no secret"


def test_a_page_that_others_reach_has_a_token() -> None:
    page = Section(enabled=True)
    controller = Controller(address="0.0.0.0:9893", page=page)
    assert any("controller.page.tokenFile: is not set" in p for p in told(controller))
    assert told(replace(controller, page=replace(page, allow_anonymous=True))) == []
    with_token = replace(controller, page=replace(page, token_file="/t"))
    assert any("unencrypted" in p for p in told(with_token))
    tls = {"tls_cert": "/c", "tls_key": "/k"}
    assert told(replace(with_token, **tls)) == []
    same = replace(with_token, token_file="/t", **tls)
    assert any("expected another token" in p for p in told(same))
    assert told(replace(controller, address="127.0.0.1:9893")) == []


def told(controller: Controller) -> list[str]:
    return [p for p in validate_config(AgentConfig(controller=controller)) if "controller" in p]


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("ftp://{node}/", "controller.page.nodeURL: 'ftp://{node}/', expected http:// or https://"),
        ("https://pages/", "'https://pages/' names no node, expected {node} or {address} in it"),
    ],
)
def test_a_link_that_leads_to_no_node_is_a_mistake(url: str, said: str) -> None:
    assert any(said in p for p in told(Controller(page=Section(node_url=url)))), said


def test_nodes_are_chosen_by_what_is_not_well(bed: ClusterPage) -> None:
    zone = {f"{PREFIX}/capacity-factor": "0.5"}
    bed.tell(topology(8, 4, name="b", zone=zone), topology(8, name="a"))
    assert names(document(bed, "state=reduced-capacity")) == ["b"]
    assert names(document(bed, "sort=problems")) == ["b", "a"]
