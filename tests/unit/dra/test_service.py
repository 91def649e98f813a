"""The sockets as the kubelet uses them."""

import socket
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest

from nri_numa.dra.claims import InvalidClaim
from nri_numa.dra.pb import dra_pb2 as dra
from nri_numa.dra.pb import pluginregistration_pb2 as registration
from nri_numa.dra.service import HEALTH_SERVICES, KubeletPlugin, PreparedDevice
from nri_numa.errors import RuntimeUnavailable

DRIVER = "dra.example.com"
CALLS = "/k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin/"
REGISTRATION = "/pluginregistration.Registration/"


@dataclass
class Book:
    """Prepares every claim but those that are called bad."""

    unprepared: list[str] = field(default_factory=list)
    registered: int = 0
    problem: str = ""

    def prepare_claim(self, namespace: str, name: str, uid: str) -> list[PreparedDevice]:
        if name == "bad":
            raise InvalidClaim("it is bad")
        return [
            PreparedDevice(
                "cpus", "n1", "numa1", f"kind={uid}", "share" if name == "shared" else ""
            )
        ]

    def unprepare_claim(self, uid: str) -> None:
        if uid == "stuck":
            raise OSError("the disk is full")
        self.unprepared.append(uid)

    def pool_and_device_health(self) -> tuple[str, dict[str, str]]:
        return "n1", {"numa0": "", "numa1": self.problem}

    def taken(self) -> None:
        self.registered += 1


@dataclass
class DRAPluginBed:
    """A plugin, its book and its sockets."""

    book: Book
    plugin: KubeletPlugin
    registry: Path
    endpoint: Path

    def call(self, path: Path, method: str, request: Any, answer: Any) -> Any:
        with grpc.insecure_channel(
            f"unix:{path}", options=[("grpc.default_authority", "localhost")]
        ) as channel:
            made = channel.unary_unary(
                method,
                request_serializer=lambda message: message.SerializeToString(),
                response_deserializer=answer.FromString,
            )
            return made(request, timeout=60, wait_for_ready=True)

    def claims(self, method: str, *claims: tuple[str, str]) -> Any:
        kind = "Prepare" if method == "NodePrepareResources" else "Unprepare"
        made = [dra.Claim(namespace="shop", name=name, uid=uid) for name, uid in claims]
        request = getattr(dra, f"Node{kind}ResourcesRequest")(claims=made)
        answer = getattr(dra, f"Node{kind}ResourcesResponse")
        return self.call(self.endpoint, CALLS + method, request, answer).claims


@pytest.fixture
def bed(directory: Path) -> Iterator[DRAPluginBed]:
    book = Book()
    registry, endpoint = directory / "registry/d-reg.sock", directory / "plugins/d/dra.sock"
    made = KubeletPlugin(DRIVER, str(registry), str(endpoint), book, book.taken)
    made.start()
    yield DRAPluginBed(book, made, registry, endpoint)
    made.stop()


def test_the_kubelet_finds_it(bed: DRAPluginBed) -> None:
    asked = registration.InfoRequest()
    info = bed.call(bed.registry, REGISTRATION + "GetInfo", asked, registration.PluginInfo)
    assert (info.type, info.name, info.endpoint) == ("DRAPlugin", DRIVER, str(bed.endpoint))
    assert list(info.supported_versions) == ["v1.DRAPlugin", *HEALTH_SERVICES]


@pytest.mark.parametrize("service", HEALTH_SERVICES)
def test_the_health_of_devices_and_changes_are_said(bed: DRAPluginBed, service: str) -> None:
    with grpc.insecure_channel(f"unix:{bed.endpoint}") as channel:
        stream = channel.unary_stream(
            f"/{service}/NodeWatchResources",
            request_serializer=dra.NodeWatchResourcesRequest.SerializeToString,
            response_deserializer=dra.NodeWatchResourcesResponse.FromString,
        )(dra.NodeWatchResourcesRequest(), timeout=60, wait_for_ready=True)
        first = next(stream).devices
        assert [(one.device.pool_name, one.device.device_name, one.health) for one in first] == [
            ("n1", "numa0", dra.HEALTHY),
            ("n1", "numa1", dra.HEALTHY),
        ]
        bed.book.problem = "CPU 3 is offline"
        second = next(stream).devices[1]
        assert (second.health, second.message) == (dra.UNHEALTHY, "CPU 3 is offline")
        assert second.last_updated_time >= first[1].last_updated_time > 0
        bed.plugin.stop()
        with pytest.raises((grpc.RpcError, StopIteration)):
            next(stream)


@pytest.mark.parametrize("taken", [True, False])
def test_it_is_told_what_the_kubelet_says(bed: DRAPluginBed, taken: bool) -> None:
    bed.call(
        bed.registry,
        REGISTRATION + "NotifyRegistrationStatus",
        registration.RegistrationStatus(plugin_registered=taken, error="" if taken else "no"),
        registration.RegistrationStatusResponse,
    )
    assert bed.book.registered == int(taken)


def test_each_claim_has_an_entry(bed: DRAPluginBed) -> None:
    found = bed.claims("NodePrepareResources", ("good", "u1"), ("bad", "u2"), ("shared", "u3"))
    assert sorted(found) == ["u1", "u2", "u3"]
    (device,) = found["u1"].devices
    assert [*device.request_names, device.pool_name, device.device_name] == ["cpus", "n1", "numa1"]
    assert list(device.cdi_device_ids) == ["kind=u1"]
    assert not device.HasField("share_id")
    assert found["u3"].devices[0].share_id == "share"
    assert (found["u2"].error, len(found["u2"].devices)) == ("it is bad", 0)


def test_what_is_forgotten_has_an_entry_too(bed: DRAPluginBed) -> None:
    found = bed.claims("NodeUnprepareResources", ("a", "u1"), ("b", "stuck"))
    assert found["u1"].error == ""
    assert "claim shop/b: the disk is full" in found["stuck"].error
    assert bed.book.unprepared == ["u1"]


def test_sockets_of_a_killed_process_are_taken_over(directory: Path) -> None:
    registry, endpoint = directory / "d-reg.sock", directory / "dra.sock"
    for path in (registry, endpoint):
        left = socket.socket(socket.AF_UNIX)
        left.bind(str(path))
        left.close()
    book = Book()
    plugin = KubeletPlugin(DRIVER, str(registry), str(endpoint), book, book.taken)
    plugin.start()
    try:
        assert DRAPluginBed(book, plugin, registry, endpoint).claims(
            "NodePrepareResources", ("a", "u")
        )
    finally:
        plugin.stop()
    assert not registry.exists()
    assert not endpoint.exists()


def test_a_place_that_is_none_is_named(directory: Path) -> None:
    (directory / "file").write_text("")
    book = Book()
    endpoint = str(directory / "file/dra.sock")
    plugin = KubeletPlugin(DRIVER, str(directory / "r.sock"), endpoint, book, book.taken)
    with pytest.raises(RuntimeUnavailable, match=f"DRA socket {endpoint} cannot be made"):
        plugin.start()
