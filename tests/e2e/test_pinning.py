"""What a pod asks for is what its first instruction sees: lists, computed assignments, refusals."""

import json

import pytest

from tests.beds.cri import (
    CRI,
    PREFIX,
    CRIError,
    QoS,
    Resources,
    Seen,
    allowed,
    asks,
    burstable,
    guaranteed,
)
from tests.beds.plugin_process import PluginProcess, StartPlugin
from tests.machines.cpus import FIRST, LAST


@pytest.mark.core
def test_cpus_and_mems_as_listed(cri: CRI, plugin: PluginProcess) -> None:
    container = cri.pod("listed", numacpu="1", numamem="0")
    assert cri.first_line(container) == Seen(cpus="1", mems="0")
    assert cri.allowed(container) == Seen(cpus="1", mems="0")


def test_cpus_only_leaves_the_memory_alone(cri: CRI, plugin: PluginProcess) -> None:
    container = cri.pod("cpus-only", numacpu=LAST)
    assert cri.first_line(container) == Seen(cpus=LAST, mems=allowed("self").mems)
    spec = cri.info(container)["runtimeSpec"]["linux"]["resources"]["cpu"]
    assert spec["cpus"] == LAST
    assert not spec.get("mems")


def test_keys_for_one_container_beat_those_of_the_pod(cri: CRI, plugin: PluginProcess) -> None:
    pod = cri.run_pod(
        "per-container", annotations=asks(numacpu="0-1", numacpu__web=FIRST, numacpu__log=LAST)
    )
    assert cri.first_line(cri.run(pod, "web")).cpus == FIRST
    # Its request pays for its list: lists that nobody pays for may name half of the CPUs.
    assert cri.first_line(cri.run(pod, "log", resources=guaranteed(1))).cpus == LAST
    assert cri.first_line(cri.run(pod, "other", resources=guaranteed(2))).cpus == "0-1"


@pytest.mark.core
def test_nothing_asked_is_nothing_changed(cri: CRI, plugin: PluginProcess) -> None:
    container = cri.run(cri.run_pod("plain", qos=QoS.BURSTABLE), resources=burstable(0.5))
    assert cri.first_line(container) == allowed("self")
    assigned = json.loads(cri.spec_annotations(container)[f"{PREFIX}/assigned"])
    assert (assigned["kind"], assigned["cpus"], assigned["mems"]) == ("unpinned", "", "")


def test_the_decision_can_be_read_back(cri: CRI, plugin: PluginProcess) -> None:
    container = cri.pod("read-back", numacpu=LAST, numamem="0")
    assigned = json.loads(cri.spec_annotations(container)[f"{PREFIX}/assigned"])
    assert (assigned["cpus"], assigned["mems"]) == (LAST, "0")
    assert assigned["reason"]
    cri.first_line(container)
    assert cri.logs(container)[0].endswith(f"numa_cpus={LAST} numa_mems=0")
    decided = [record for record in plugin.records() if record.get("container") == "main"]
    assert any(record.get("pod") == "default/read-back" for record in decided)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"numacpu": "63"}, ["numacpu", "'63'", "does not exist"]),
        ({"cpu": "1"}, [f"{PREFIX}/cpu", "expected"]),
        ({"numacpu": "1", "bind": "none"}, ["numacpu", "bind"]),
    ],
    ids=["absent-cpu", "unknown-key", "contradiction"],
)
def test_a_bad_value_fails_the_creation_with_our_words(
    cri: CRI, plugin: PluginProcess, keys: dict[str, str], expected: list[str]
) -> None:
    """The error that the kubelet shows names pod, container, key, value and expectation."""
    pod = cri.run_pod("refused", namespace="shop", annotations=asks(**keys))
    with pytest.raises(CRIError) as caught:
        cri.create(pod, "web")
    for words in ("shop/refused", "web", *expected):
        assert words in caught.value.message
    assert cri.containers() == []
    # The next one is served, and nothing of the refused one is remembered.
    fine = cri.pod("fine", numacpu="1")
    assert cri.first_line(fine).cpus == "1"
    remembered = plugin.checkpoint.read_text()
    assert "fine" in remembered
    assert "refused" not in remembered


def test_observe_changes_nothing(cri: CRI, start_plugin: StartPlugin) -> None:
    start_plugin({"observe": True})
    listed = cri.pod("listed", numacpu="1")
    assert cri.first_line(listed) == allowed("self")
    rejected = cri.pod("refused", numacpu="63")
    assert cri.first_line(rejected) == allowed("self")


def test_the_plugin_leaves_the_rest_of_the_container_alone(cri: CRI, plugin: PluginProcess) -> None:
    """Memory limit and shares that were asked for arrive unchanged beside the pin."""
    container = cri.pod("rest", limit=0.5, numacpu="1")
    resources = cri.info(container)["runtimeSpec"]["linux"]["resources"]
    assert resources["memory"]["limit"] == guaranteed(0.5).memory
    assert (resources["cpu"]["shares"], resources["cpu"]["quota"]) == (512, 50_000)
    cri.update(container, Resources(shares=256))
    resources = cri.info(container)["runtimeSpec"]["linux"]["resources"]
    assert resources["cpu"]["shares"] == 256
    assert cri.allowed(container).cpus == "1"
