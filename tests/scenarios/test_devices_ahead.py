"""Containers with devices, decided ahead: for these devices, and for no others."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from nri_numa.devices.given import GivenDevice
from nri_numa.nri import conversion
from nri_numa.nri.adapter import Adapter
from nri_numa.nri.wire.pb import nri_pb2 as pb
from tests.beds.device_tree import GPU_CLASS, DeviceTree
from tests.beds.device_watch import Given, Watch, kubelet_answers
from tests.scenarios.test_decided_ahead import OWN, SHARED
from tests.scenarios.test_foreseen import Bed

GPU_0, GPU_1 = "0000:0b:00.0", "0000:1b:00.0"
"""On NUMA nodes 0 and 1, with the minor numbers 0 and 1."""


@pytest.fixture
def kubelet(monkeypatch: pytest.MonkeyPatch) -> dict[str, Given]:
    return kubelet_answers(monkeypatch)


def given(*devices: str, resource: str = "x.com/gpu") -> tuple[GivenDevice, ...]:
    return tuple(GivenDevice(resource, device, frozenset()) for device in devices)


class DeviceBed(Bed):
    """A node with a GPU on each of its two NUMA nodes."""

    def __init__(self, root: Path) -> None:
        super().__init__()
        tree = DeviceTree(root)
        for minor, address in enumerate((GPU_0, GPU_1)):
            card = tree.pci(address, minor, GPU_CLASS)
            tree.number("char", f"226:{minor}", tree.child(card, "drm", f"renderD{minor}"))
        self.tree = tree
        self.watch = Watch(root, self.agent)
        self.watch.start(self.waiting.append)
        self.adapter = Adapter(
            self.agent, self.world.metrics, ahead=self.ahead, devices=self.watch
        )  # fmt: skip

    def rest(self) -> None:
        self.watch.settle()
        super().rest()

    def with_file(self, name: str, minor: int, cpus: int = 2) -> pb.CreateContainerRequest:
        """A request whose message has the device file of a GPU."""
        request = self.ask(name, OWN if cpus else SHARED, cpus)
        request.container.linux.devices.add(path="/dev/gpu", type="c", major=226, minor=minor)
        return request

    def numa_nodes(self, name: str) -> str:
        return str(self.agent.state.allocations[f"c-{name}"].numa_nodes)

    def steps(self, name: str) -> str:
        self.rest()
        grounds = self.agent.grounds_of(f"c-{name}")
        assert grounds is not None
        return "; ".join(grounds.basis.steps)


@pytest.fixture
def bed(tmp_path: Path, kubelet: dict[str, Given]) -> DeviceBed:
    return DeviceBed(tmp_path)


@pytest.mark.parametrize("cpus", [0, 2])
def test_a_replica_with_the_same_device_file_is_decided_ahead(bed: DeviceBed, cpus: int) -> None:
    assert not bed.comes(bed.with_file("a", 1, cpus))
    bed.rest()
    assert bed.comes(bed.with_file("b", 1, cpus))
    assert bed.numa_nodes("b") == "1"
    assert f"on NUMA node 1 because its GPU {GPU_1} is there" in bed.steps("b")


def test_one_with_another_device_gets_a_decision_of_its_own(bed: DeviceBed) -> None:
    bed.comes(bed.with_file("a", 1))
    bed.rest()
    assert not bed.comes(bed.with_file("b", 0))
    assert bed.numa_nodes("b") == "0"
    assert f"on NUMA node 0 because its GPU {GPU_0} is there" in bed.steps("b")
    without = bed.ask("c", OWN)
    assert not bed.comes(without)
    assert "GPU" not in bed.steps("c")


def test_what_the_kubelet_gave_is_foreseen_once_it_has_answered(
    bed: DeviceBed, kubelet: dict[str, Given]
) -> None:
    kubelet["a"] = {"app": given(GPU_1)}
    request = bed.ask("a", OWN)
    bed.adapter.run_pod(request.pod)
    assert not bed.waiting, "nothing is foreseen before the kubelet has answered"
    bed.rest()
    assert bed.comes(request)
    assert bed.numa_nodes("a") == "1"
    assert f"on NUMA node 1 because its GPU {GPU_1} is there" in bed.steps("a")


def test_a_file_of_what_the_kubelet_gave_tells_nothing_new(
    bed: DeviceBed, kubelet: dict[str, Given]
) -> None:
    kubelet["a"] = {"app": given(GPU_1)}
    request = bed.with_file("a", 1)
    bed.begins(request)
    assert bed.comes(request)


def test_a_replica_that_is_given_another_device_is_foreseen_with_that(
    bed: DeviceBed, kubelet: dict[str, Given]
) -> None:
    for name, gpu, node in (("a", GPU_1, "1"), ("b", GPU_0, "0"), ("c", GPU_1, "1")):
        kubelet[name] = {"app": given(gpu)}
        request = bed.ask(name, OWN)
        # Its sandbox would tell otherwise: what counts is what the first one had.
        request.container.linux.resources.memory.limit.value = 1 << 20
        bed.begins(request)
        assert bed.comes(request) == (name != "a")
        bed.rest()
        assert bed.numa_nodes(name) == node
        assert f"because its GPU {gpu} is there" in bed.steps(name)


def test_one_that_meets_other_devices_than_foreseen_is_decided_when_it_comes(
    bed: DeviceBed, kubelet: dict[str, Given]
) -> None:
    kubelet["a"] = {"app": given(GPU_1)}
    request = bed.with_file("a", 0, 0)
    bed.begins(request)
    assert not bed.comes(request)
    assert "GPU 0000:0b:00.0, 0000:1b:00.0" in bed.steps("a")
    # The kubelet says something else by the time that the container comes.
    kubelet["b"] = {"app": given(GPU_1)}
    other = bed.ask("b", SHARED, 0)
    bed.begins(other)
    kubelet["b"] = {"app": given(GPU_0)}
    bed.watch.began(conversion.pod_from(other.pod), "")
    bed.watch.settle()
    assert not bed.comes(other)
    assert bed.numa_nodes("b") == "0"


def test_one_that_comes_before_the_answer_is_placed_without_and_says_so(
    bed: DeviceBed, kubelet: dict[str, Given]
) -> None:
    kubelet["a"] = {"app": given(GPU_1)}
    request = bed.ask("a", OWN)
    bed.adapter.run_pod(request.pod)
    assert not bed.comes(request)
    assert "the kubelet has not said yet what it gave" in bed.steps("a")


def test_where_several_containers_were_given_devices_nothing_is_foreseen(
    bed: DeviceBed, kubelet: dict[str, Given]
) -> None:
    kubelet["a"] = {"app": given(GPU_1), "helper": given(GPU_0)}
    request = bed.ask("a", OWN)
    bed.begins(request)
    assert not bed.comes(request)
    assert bed.numa_nodes("a") == "1"


def test_devices_that_only_the_message_tells_are_taken_to_be_those_of_the_last(
    bed: DeviceBed,
) -> None:
    first = bed.with_file("a", 1)
    bed.begins(first)
    assert not bed.comes(first)
    bed.rest()
    second = bed.with_file("b", 1)
    bed.begins(second)
    assert bed.comes(second)


def test_nothing_is_read_while_a_container_with_known_devices_waits(
    bed: DeviceBed, kubelet: dict[str, Given], monkeypatch: pytest.MonkeyPatch
) -> None:
    def request(name: str, file: bool) -> pb.CreateContainerRequest:
        made = bed.with_file(name, 0, 0) if file else bed.ask(name, SHARED, 0)
        made.container.linux.devices.add(path="/dev/none", type="c", major=226, minor=77)
        made.container.env.extend((f"PCIDEVICE_X={GPU_0}", "PCIDEVICE_Y=0000:ff:00.0"))
        return made

    bed.comes(request("first", file=True))
    bed.rest()
    kubelet["b"] = {"app": given(GPU_0, GPU_1)}
    for name in "abc":
        bed.begins(request(name, file=True))

    def forbidden(*arguments: object, **named: object) -> None:
        raise AssertionError(f"read while a container waits: {arguments}")

    for name in ("readlink", "open", "listdir"):
        monkeypatch.setattr(os, name, forbidden)
    monkeypatch.setattr(os.path, "isdir", forbidden)
    # What a message tells, what the kubelet gave, and both without a decision that is ready.
    assert bed.comes(request("a", file=True))
    assert not bed.comes(request("b", file=True))
    assert not bed.comes(request("c", file=False))


def test_a_device_that_went_is_no_hint_from_the_next_sandbox_on(bed: DeviceBed) -> None:
    bed.comes(bed.with_file("a", 1))
    bed.rest()
    (bed.tree.root / "sys/dev/char/226:1").unlink()
    assert bed.comes(bed.with_file("b", 1)), "it is a hint until somebody looks"
    bed.rest()
    third = bed.with_file("c", 1)
    bed.begins(third)
    assert not bed.comes(third)
    assert "GPU" not in bed.steps("c")
