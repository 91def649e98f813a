"""What follows from the version of the other side."""

from __future__ import annotations

import pytest

from nri_numa.nri.wire import versions
from nri_numa.nri.wire.pb import nri_pb2 as pb
from nri_numa.nri.wire.versions import Event, PushPath
from nri_numa.runtime import RuntimeInfo


def info(
    name: str = "containerd", version: str = "", nri: str = "", timeouts: bool = True
) -> RuntimeInfo:
    return RuntimeInfo(
        name=name,
        version=version,
        nri_version=nri,
        registration_timeout=5.0 if timeouts else 0.0,
        request_timeout=2.0 if timeouts else 0.0,
        config="",
    )


def test_events_have_the_protocols_numbers_and_names() -> None:
    for event in Event:
        assert pb.Event.Value(event.name) == event.value
        assert event.method_name in {
            m.name for m in pb.DESCRIPTOR.services_by_name["Plugin"].methods
        }
    assert Event.VALIDATE_CONTAINER_ADJUSTMENT.mask_bit == 0x2000
    # The eleven events of NRI 0.2, which every runtime knows; one bit more and older ones hang up.
    assert 0 < versions.AGENT_EVENTS <= 0x07FF


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2.1.9+unknown", (2, 1, 9)),
        ("1.7.24~ds1", (1, 7, 24)),
        ("2.2.0-rc.1", (2, 2, 0)),
        (" 1.34", (1, 34, 0)),
        ("v0.12.2", (0, 12, 2)),
        ("", None),
        ("(devel)", None),
        ("2", None),
        ("٢.١", None),
        ("9999999999.1", None),
    ],
)
def test_versions_are_read_leniently(text: str, expected: tuple[int, int, int] | None) -> None:
    assert versions.parse_version(text) == expected


@pytest.mark.parametrize(
    ("runtime", "path"),
    [
        (info(version="v2.4.0", nri="v0.12.2"), PushPath.UPDATE_CONTAINERS),
        (info(version="v2.4.0-beta.0", nri="v0.12.1"), PushPath.UPDATE_CONTAINERS),
        (info(version="v2.4.0", nri="v0.13.0-rc.1"), PushPath.UPDATE_CONTAINERS),
        (info(version="main", nri="v0.12.1-0.20260610-abcdef"), PushPath.ONE_SHOT),
        (info(version="v2.3.4", nri="v0.12.0"), PushPath.ONE_SHOT),
        (info(version="v2.4.0", nri="(devel)"), PushPath.ONE_SHOT),
        (info(version="2.1.9"), PushPath.ONE_SHOT),
        (info("cri-o", "1.35.0"), PushPath.ONE_SHOT),
        (info("other", "1.0"), PushPath.ONE_SHOT),
        (info(version="1.7.16", timeouts=False), PushPath.ONE_SHOT),
        (info(version="1.7.15", timeouts=False), PushPath.NONE),
        (info("cri-o", "1.31.0", timeouts=False), PushPath.ONE_SHOT),
        (info("cri-o", "1.30.0", timeouts=False), PushPath.NONE),
        (info("other", "9.9", timeouts=False), PushPath.NONE),
    ],
)
def test_updates_are_pushed_only_in_a_way_that_cannot_hang_the_runtime(
    runtime: RuntimeInfo, path: PushPath
) -> None:
    assert versions.push_path(runtime) is path


def test_only_old_runtimes_keep_what_runs_from_the_plugins_they_launch() -> None:
    assert not versions.synchronizes_launched_plugins(info(version="1.7.24", timeouts=False))
    assert versions.synchronizes_launched_plugins(info(version="2.1.9"))


@pytest.mark.parametrize(
    ("name", "index", "problem"),
    [
        ("nri-numa", "10", None),
        ("a.b+c_D-9", "00", None),
        ("", "10", "is empty"),
        ("naïve", "10", "expected only"),
        ("x\n", "10", "expected only"),
        ("x", "1", "two digits"),
        ("x", "100", "two digits"),
        ("x", "a1", "two digits"),
        ("x", "١٢", "two digits"),
    ],
)
def test_a_name_or_index_no_runtime_takes_is_named(
    name: str, index: str, problem: str | None
) -> None:
    found = versions.identity_problem(name, index)
    assert (found is None) if problem is None else (found is not None and problem in found)
