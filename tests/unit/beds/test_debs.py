"""The package cache of the test beds: finding the archive, choosing versions, broken caches."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.beds.debs import (
    CONTAINERD_1_7,
    DebCache,
    Mirror,
    Package,
    Wanted,
    machine_mirror,
    mirrors_of,
    pick_version,
)
from tests.beds.testbed import TestbedUnavailable

MADISON = """
containerd | 2.1.9+ds1-5 | http://mirror.example/debian sid/main amd64 Packages
containerd | 1.7.24~ds1-6+deb13u1 | http://mirror.example/debian trixie/main amd64 Packages
containerd | 1.6.20~ds1-1+deb12u1 | http://mirror.example/debian bookworm/main amd64 Packages
"""


def test_deb822_sources_give_the_archive_and_its_keyring() -> None:
    text = """
Types: deb
# an old snapshot
URIs: http://mirror.example/debian
Suites: bookworm bookworm-updates
Components: main
Signed-By: /usr/share/keyrings/archive.gpg

Types: deb
URIs: http://mirror.example/debian-security
Suites: bookworm-security
Components: main
"""
    assert mirrors_of(text, deb822=True) == [
        Mirror(uri="http://mirror.example/debian", signed_by="/usr/share/keyrings/archive.gpg")
    ]


@pytest.mark.parametrize(
    "text",
    [
        "Types: deb-src\nURIs: http://m.example/debian\nSuites: sid\nComponents: main\n",
        "Types: deb\nURIs: http://m.example/x\nSuites: nodistro\nComponents: main\n",
        "Types: deb\nEnabled: no\nURIs: http://m.example/debian\nSuites: sid\nComponents: main\n",
        "",
    ],
)
def test_other_sources_are_no_debian_archive(text: str) -> None:
    assert mirrors_of(text, deb822=True) == []


def test_one_line_sources_are_read_with_their_options() -> None:
    text = (
        "# deb http://no.example/debian sid main\n"
        "deb-src http://no.example/debian sid main\n"
        "deb http://other.example/app stable-app main\n"
        "deb [arch=amd64 signed-by=/k.gpg] http://m.example/debian trixie main contrib # mine\n"
    )
    assert mirrors_of(text, deb822=False) == [
        Mirror(uri="http://m.example/debian", signed_by="/k.gpg")
    ]


def test_a_machine_without_an_archive_is_told_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NRI_NUMA_DEBIAN_MIRROR", raising=False)
    (tmp_path / "sources.list.d").mkdir()
    (tmp_path / "sources.list.d" / "x.sources.off").write_text("Types: deb\n")
    with pytest.raises(TestbedUnavailable, match="NRI_NUMA_DEBIAN_MIRROR"):
        machine_mirror(tmp_path)


def test_the_wanted_series_beats_the_order_of_suites() -> None:
    assert pick_version(MADISON, CONTAINERD_1_7) == ("1.7.24~ds1-6+deb13u1", "trixie")
    newest = Wanted(label="x", package="containerd", version_prefix="2.", suites=("sid", "trixie"))
    assert pick_version(MADISON, newest) == ("2.1.9+ds1-5", "sid")


def test_a_series_that_is_gone_is_replaced_by_what_the_suite_has() -> None:
    moved_on = Wanted(label="x", package="containerd", version_prefix="1.5.", suites=("sid",))
    assert pick_version(MADISON, moved_on) == ("2.1.9+ds1-5", "sid")
    assert pick_version("", moved_on) is None


@pytest.mark.parametrize(
    ("version", "upstream"),
    [("1.7.24~ds1-6+deb13u1", "1.7.24"), ("2.1.9+ds1-5", "2.1.9"), ("1:1.35.0-4+b1", "1.35.0")],
)
def test_upstream_version(version: str, upstream: str) -> None:
    package = Package(label="x", package="x", version=version, suite="sid", root=Path("/"))
    assert package.upstream_version == upstream


def test_half_written_caches_are_not_believed(tmp_path: Path) -> None:
    cache = DebCache(tmp_path)
    cache.directory.mkdir()
    assert cache.cached("runc") is None
    record = {"label": "runc", "package": "runc", "version": "1", "suite": "s", "directory": "r"}
    file = cache.directory / "runc.json"
    file.write_text(json.dumps(record)[:20])
    assert cache.cached("runc") is None
    file.write_text(json.dumps(record))
    assert cache.cached("runc") is None
    (cache.directory / "r" / "usr").mkdir(parents=True)
    assert cache.cached("runc") is not None


def test_what_is_cached_needs_neither_network_nor_a_writable_cache(tmp_path: Path) -> None:
    cache = DebCache(tmp_path)
    (cache.directory / "r" / "usr").mkdir(parents=True)
    record = {"label": "runc", "package": "runc", "version": "1", "suite": "s", "directory": "r"}
    (cache.directory / "runc.json").write_text(json.dumps(record))
    (package,) = cache.fetch(Wanted(label="runc", package="runc"))
    assert package.root == cache.directory / "r"
    assert not (cache.directory / ".lock").exists()


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "debs").write_text("a file where the directory should be")
    with pytest.raises(TestbedUnavailable, match="NRI_NUMA_CACHE"):
        DebCache(tmp_path).fetch(Wanted(label="x", package="x"))
