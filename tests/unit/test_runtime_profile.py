"""How each runtime behaves, by what it says of itself."""

import pytest

from nri_numa.runtime import RuntimeInfo
from nri_numa.runtime_profile import PROFILES, PushPath, profile_of, profile_of_version

NONE, ONE_SHOT, PLAIN = PushPath.NONE, PushPath.ONE_SHOT, PushPath.UPDATE_CONTAINERS


def info(name: str, version: str, nri: str = "", timeouts: bool = True) -> RuntimeInfo:
    return RuntimeInfo(
        name=name,
        version=version,
        nri_version=nri,
        registration_timeout=5.0 if timeouts else 0.0,
        request_timeout=2.0 if timeouts else 0.0,
    )


@pytest.mark.parametrize(
    ("told", "push", "launched", "policies"),
    [
        (info("containerd", "1.7.15", timeouts=False), NONE, False, False),
        (info("containerd", "1.7.24~ds1", timeouts=False), ONE_SHOT, False, False),
        (info("containerd", "1.7.29"), ONE_SHOT, True, False),
        (info("containerd", "2.1.9"), ONE_SHOT, True, False),
        (info("containerd", "v2.3.4", "v0.12.0"), ONE_SHOT, True, True),
        (info("containerd", "v2.4.0", "v0.12.2"), PLAIN, True, True),
        (info("cri-o", "1.30.0", timeouts=False), NONE, False, False),
        (info("cri-o", "1.31.0", timeouts=False), ONE_SHOT, False, False),
        (info("cri-o", "1.35.0"), ONE_SHOT, True, False),
        (info("cri-o", "1.37.0", "v0.12.0"), ONE_SHOT, True, True),
        (info("cri-o", "1.38.0", "v0.12.1"), PLAIN, True, True),
        # A name or version without a row: what is told, and no more.
        (info("other", "9.9", timeouts=False), NONE, False, False),
        (info("other", "1.0"), ONE_SHOT, True, False),
        (info("other", "1.0", "v0.13.0-rc.1"), PLAIN, True, True),
        (info("containerd", "main", "v0.12.1-0.20260610-abcdef"), ONE_SHOT, True, True),
        (info("containerd", "v2.4.0", "(devel)"), ONE_SHOT, True, True),
        (info("containerd", "v2.4.0-beta.0", "v0.12.1"), PLAIN, True, True),
        # A row that promises more than is told.
        (info("containerd", "2.3.7"), ONE_SHOT, True, False),
        (info("containerd", "2.3.7", timeouts=False), ONE_SHOT, False, False),
    ],
)
def test_what_may_be_sent_to_a_runtime_that_introduced_itself(
    told: RuntimeInfo, push: PushPath, launched: bool, policies: bool
) -> None:
    """A push is sent only in a way that cannot hang the runtime."""
    profile = profile_of(told)
    found = profile.push, profile.synchronizes_launched, profile.has_memory_policies
    assert found == (push, launched, policies)
    assert profile.has_pod_update_event == bool(told.nri_version)


@pytest.mark.parametrize(
    ("name", "version", "has_nri", "by_default", "merges", "resize"),
    [
        ("containerd", "1.6", False, False, False, False),
        ("containerd", "1.7.15", True, False, False, False),
        ("containerd", "1.7.24~ds1", True, False, False, False),
        ("containerd", "1.7.29", True, False, False, False),
        ("containerd", "2.2.0~rc1", True, True, True, False),
        ("containerd", "2.3", True, True, True, True),
        ("cri-o", "1.29.1", True, False, True, False),
        ("cri-o", "1.30.0", True, True, True, False),
        ("CRI-O", "1.33.5", True, True, True, False),
        ("cri-o", "1.36.0", True, True, True, False),
        ("cri-o", "1.37.0", True, True, True, False),
        ("other", "1.0", True, True, True, False),
        ("containerd", "nonsense", True, True, True, False),
    ],
)
def test_what_an_installed_runtime_does(
    name: str, version: str, has_nri: bool, by_default: bool, merges: bool, resize: bool
) -> None:
    row = profile_of_version(name, version)
    assert (row.nri_release is not None) == has_nri
    found = row.nri_by_default, row.merges_config_tables, row.tells_pod_resize
    assert found == (by_default, merges, resize)


def test_the_first_row_that_fits_is_the_right_one() -> None:
    for name in {name for name, _, _ in PROFILES}:
        versions = [since for row_name, since, _ in PROFILES if row_name == name]
        assert versions == sorted(versions, reverse=True)


@pytest.mark.parametrize(
    ("told", "reports"),
    [
        (info("containerd", "2.3.7", "v0.12.0"), True),
        (info("other", "1.0"), True),
        (info("cri-o", "1.26.4", timeouts=False), False),
        (info("cri-o", "1.37.0", "v0.12.0"), False),
    ],
)
def test_cri_o_reports_no_failed_creation(told: RuntimeInfo, reports: bool) -> None:
    assert profile_of(told).reports_failed_creations == reports


def test_cri_o_has_nri_since_1_26() -> None:
    assert profile_of_version("cri-o", "1.25.3").nri_release is None
    assert profile_of_version("cri-o", "1.26.0").nri_release is not None
