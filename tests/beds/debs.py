"""Debian packages of other suites, resolved and unpacked into a cache; nothing is installed.

A second apt configuration beside the machine's own (own source list, own package lists, own
archives) reaches newer suites of the mirror which the machine uses already, with the same keyring
and the same proxy settings. What was unpacked once is used without the network from then on.
"""

import contextlib
import json
import os
import re
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from msgspec.structs import replace

from tests.beds.testbed import TestbedUnavailable, cache_dir, locked, run

# The newest suite last: a package that is in none of its preferred suites is taken from the oldest
# that has it, because an older build runs on a newer C library and not the other way round.
SUITES = ("bookworm", "trixie", "sid")
_DEBIAN_SUITE = re.compile(
    r"^(bullseye|bookworm|trixie|forky|sid|oldoldstable|oldstable|stable|testing|unstable)$"
)
_APT_TIMEOUT_S = 600  # a slow mirror; package lists are 20 MB


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A package to have.

    Attributes:
        label: our name for it, ``containerd-1.7``.
    """

    label: str
    package: str
    suites: tuple[str, ...] = SUITES


class Package(msgspec.Struct, frozen=True, kw_only=True):
    """An unpacked package; files are below ``root`` as they would be below ``/``."""

    package: str
    version: str
    suite: str
    directory: str
    root: Path = Path()

    @property
    def upstream_version(self) -> str:
        """``1.7.24`` of ``1.7.24~ds1-6+deb13u1`` and ``1.35.0`` of ``1:1.35.0-4``."""
        return re.split(r"[~+-]", self.version.split(":", 1)[-1], maxsplit=1)[0]


CONTAINERD_1_7 = Wanted(label="containerd-1.7", package="containerd", suites=("trixie",))
# Newer builds of runc want a newer C library than Debian 12 has.
RUNC = Wanted(label="runc", package="runc", suites=("bookworm", "trixie"))
BUSYBOX = Wanted(label="busybox", package="busybox-static", suites=("bookworm", "trixie"))
# Written in C: under emulation it starts in tenths of a second where runc takes seconds.
CRUN = Wanted(label="crun", package="crun", suites=("bookworm", "trixie"))
YAJL = Wanted(label="libyajl2", package="libyajl2", suites=("bookworm", "trixie"))
CNI_PLUGINS = Wanted(
    label="cni-plugins", package="containernetworking-plugins", suites=("bookworm", "trixie")
)
# Its parser only: installed, it would be a service that every emulated machine starts, too.
APPARMOR = Wanted(label="apparmor", package="apparmor", suites=("bookworm",))


@dataclass(frozen=True, slots=True, kw_only=True)
class Mirror:
    """A Debian archive the machine already trusts.

    Attributes:
        signed_by: value of ``Signed-By``; empty: apt's own keyrings.
    """

    uri: str
    signed_by: str = ""


def machine_mirror() -> Mirror:
    """The Debian archive in this machine's apt sources, or ``$NRI_NUMA_DEBIAN_MIRROR``."""
    if configured := os.environ.get("NRI_NUMA_DEBIAN_MIRROR", ""):
        return Mirror(uri=configured)
    form = "--format=$(REPO_URI)|$(RELEASE)|$(COMPONENT)|$(SOURCESENTRY)"
    with contextlib.suppress(FileNotFoundError):
        done = subprocess.run(
            ["apt-get", "indextargets", "--no-release-info", form, "Created-By: Packages"],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        for line in done.stdout.splitlines():
            uri, suite, component, entry = line.split("|", 3)
            if component == "main" and _DEBIAN_SUITE.match(suite):
                # Of the key apt does not tell; without one its own keyrings are asked.
                source = Path(entry.rpartition(":")[0]).read_text(encoding="utf-8")
                key = re.search(r"signed-by[:=] *(/[^\s\]]+)", source, re.IGNORECASE)
                return Mirror(uri=uri, signed_by=key.group(1) if key else "")
    raise TestbedUnavailable(
        "no Debian archive in the apt sources of this machine",
        "use a Debian machine or set NRI_NUMA_DEBIAN_MIRROR to the address of a Debian archive",
    )


def pick_version(madison: str, order: Sequence[str]) -> tuple[str, str] | None:
    """Choose (version, suite) from the output of ``apt-cache madison``.

    Within one suite apt lists the newest version first.
    """
    newest: dict[str, str] = {}
    for line in madison.splitlines():
        fields = [field.strip() for field in line.split("|")]
        if len(fields) == 3 and (match := re.search(r"\s(\S+)/main\s", fields[2] + " ")):
            newest.setdefault(match.group(1), fields[1])
    return next(((newest[suite], suite) for suite in order if suite in newest), None)


class DebCache:
    """Unpacked packages under one directory; safe for several processes at once.

    Args:
        directory: the cache; default `cache_dir`.
        architecture: of packages, where it is not this machine's; in a directory of its own.
    """

    archive_suites: tuple[str, ...] = SUITES

    def __init__(self, directory: Path | None = None, *, architecture: str = "") -> None:
        self.directory = (directory or cache_dir() / architecture) / "debs"
        self.architecture = architecture
        self._lists_fresh = False

    # -- what is there ---------------------------------------------------------------------

    def _record_file(self, label: str) -> Path:
        return self.directory / f"{label}.json"

    def cached(self, label: str) -> Package | None:
        """The package of that label when it is whole in the cache; never touches the network."""
        try:
            record = msgspec.json.decode(self._record_file(label).read_bytes(), type=Package)
        except (OSError, msgspec.MsgspecError):
            return None
        package = replace(record, root=self.directory / record.directory)
        # Trees get their name by one rename after unpacking, so a name means a whole tree;
        # somebody may still have emptied it by hand.
        return package if any(package.root.glob("*")) else None

    # -- getting more ----------------------------------------------------------------------

    def fetch(self, *wanted: Wanted) -> list[Package]:
        """Have these packages, from the cache where possible."""
        have = [self.cached(each.label) for each in wanted]
        if all(have):
            return [package for package in have if package is not None]
        with self._lock():
            return [self.cached(each.label) or self._download(each) for each in wanted]

    def _lock(self) -> contextlib.AbstractContextManager[int]:
        return locked(self.directory / ".lock")

    def _apt_options(self) -> list[str]:
        apt = self.directory / "apt"
        options = {
            "Dir::Etc::SourceList": str(apt / "debian.sources"),
            "Dir::Etc::SourceParts": "/dev/null",
            "Dir::State::Lists": str(apt / "lists"),
            "Dir::Cache": str(apt / "cache"),
            # Some images switch these off; without them each call reads all lists again (10 s).
            "Dir::Cache::pkgcache": "pkgcache.bin",
            "Dir::Cache::srcpkgcache": "srcpkgcache.bin",
            "Acquire::GzipIndexes": "false",
            # The machine's own pins and hooks are about its own packages.
            "Dir::Etc::Preferences": "/dev/null",
            "Dir::Etc::PreferencesParts": "/dev/null",
            "APT::Update::Error-Mode": "any",
            "Acquire::Languages": "none",
            "Acquire::Retries": "2",
            "Acquire::http::Timeout": "30",
        }
        if self.architecture:
            options["APT::Architecture"] = options["APT::Architectures"] = self.architecture
            options["Dir::State::Status"] = "/dev/null"
        if os.geteuid() == 0:
            options["APT::Sandbox::User"] = "root"  # the cache may be closed to user _apt
        return [f"-o{key}={value}" for key, value in options.items()]

    def _apt(self, *command: str, cwd: Path | None = None) -> str:
        return run(
            *(command[0], *self._apt_options(), *command[1:]),
            cwd=cwd,
            timeout_s=_APT_TIMEOUT_S,
            env={**os.environ, "LC_ALL": "C", "DEBIAN_FRONTEND": "noninteractive"},
            remedy="check the network, the proxy settings of apt and /etc/apt/sources.list.d",
        )

    def _update_lists(self) -> None:
        if self._lists_fresh:
            return
        mirror = machine_mirror()
        apt = self.directory / "apt"
        (apt / "lists" / "partial").mkdir(parents=True, exist_ok=True)
        (apt / "cache" / "archives" / "partial").mkdir(parents=True, exist_ok=True)
        source = (
            f"Types: deb\nURIs: {mirror.uri}\nSuites: {' '.join(self.archive_suites)}\n"
            # Only the package index: no translations, no AppStream data.
            "Components: main\nTargets: Packages\n"
        )
        if mirror.signed_by:
            source += f"Signed-By: {mirror.signed_by}\n"
        (apt / "debian.sources").write_text(source, encoding="utf-8")
        self._apt("apt-get", "update")
        self._lists_fresh = True

    def _download(self, wanted: Wanted) -> Package:
        self._update_lists()
        madison = self._apt("apt-cache", "madison", wanted.package)
        suites = self.archive_suites
        choice = pick_version(madison, (*wanted.suites, *suites))
        if choice is None:
            raise TestbedUnavailable(
                f"Debian package {wanted.package} is in none of {', '.join(suites)}",
                "check the archive named in /etc/apt, or NRI_NUMA_DEBIAN_MIRROR",
            )
        version, suite = choice
        # Directory names without the characters that versions may have and PATH or -o may not.
        directory = re.sub(r"[^A-Za-z0-9.+_-]", "_", f"{wanted.package}_{version}")
        target = self.directory / directory
        if not target.is_dir():
            self._unpack(wanted.package, version, target)
        fields = {"package": wanted.package, "version": version, "suite": suite}
        record = json.dumps({**fields, "directory": directory}, indent=1)
        self._replace(self._record_file(wanted.label), record + "\n")
        return Package(**fields, directory=directory, root=target)

    def _unpack(self, package: str, version: str, target: Path) -> None:
        with tempfile.TemporaryDirectory(dir=self.directory, prefix=".unpack-") as scratch:
            self._apt("apt-get", "download", f"{package}={version}", cwd=Path(scratch))
            (archive,) = Path(scratch).glob("*.deb")
            tree = Path(scratch) / "tree"
            run("dpkg-deb", "-x", archive, tree, remedy=f"free some space at {self.directory}")
            tree.chmod(0o755)
            tree.rename(target)

    def _replace(self, file: Path, text: str) -> None:
        scratch = file.with_suffix(f".{os.getpid()}.tmp")
        scratch.write_text(text, encoding="utf-8")
        scratch.replace(file)
