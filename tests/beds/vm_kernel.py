"""A Debian kernel in the cache: downloaded once, indexed, checked at each use.

The full ``linux-image-<version>-amd64`` is taken, because the one for clouds has no 9p. Nothing is
installed; virtme-ng finds the modules beside the kernel.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import msgspec

from tests.beds.debs import DebCache, Package, Wanted
from tests.beds.testbed import TestbedUnavailable

_LABEL = "linux-image"
# bookworm's kernel is the oldest one in support, so what works there works on later ones, too.
_SUITES = ("bookworm", "trixie", "sid")
_STAMP = "nri-numa-bed.json"
_FREE_BYTES = 1_500_000_000  # a kernel package, unpacked, and the package lists to find it


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """A kernel that can be booted; `image` lies below `root`, its modules, too."""

    version: str
    image: Path
    root: Path


class _Stamp(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a whole tree looks like; written last."""

    release: str
    image_bytes: int
    modules: int
    index_bytes: int


class KernelCache(DebCache):
    """The kernel's package beside the other packages of the cache."""

    def kernel(self, series: str = "") -> Kernel:
        """The kernel, downloaded where it is missing or damaged.

        Args:
            series: ``6.12``; empty: the oldest.
        """
        label = f"{_LABEL}-{series}" if series else _LABEL
        package = self.cached(label)
        if package is not None:
            kernel = self._checked(package)
            if kernel is not None:
                return kernel
            # Killed between unpacking and indexing, or a full disk: start afresh.
            self._forget(package)
        self._need_space()
        (package,) = self.fetch(
            Wanted(label=label, package=self._package_name(series), suites=_SUITES)
        )
        return self._index(package)

    def damaged(self) -> bool:
        """Whether a kernel is in the cache that is not whole."""
        package = self.cached(_LABEL)
        return package is not None and self._checked(package) is None

    # -- steps -----------------------------------------------------------------------------

    def _need_space(self) -> None:
        at = self.directory
        while not at.exists():
            at = at.parent
        free = shutil.disk_usage(at).free
        if free < _FREE_BYTES:
            raise TestbedUnavailable(
                f"{free // 1_000_000} MB free at {at}, the kernel needs "
                f"{_FREE_BYTES // 1_000_000} MB",
                "free some space or set NRI_NUMA_CACHE to a directory on another disk",
            )

    def _package_name(self, series: str) -> str:
        """What the meta package ``linux-image-amd64`` stands for now."""
        with self._lock():
            self._update_lists()
            text = self._apt("apt-cache", "show", "--all-versions", "linux-image-amd64")
        names = re.findall(r"^Depends:.*?\b(linux-image-[0-9][^ ,]*-amd64)\b", text, re.MULTILINE)
        versions: list[str] = sorted(
            {name for name in names if name.startswith(f"linux-image-{series}")},
            key=lambda name: [int(part) for part in re.findall(r"\d+", name)],
        )
        if not versions:
            raise TestbedUnavailable(
                "the Debian archive names no linux-image for amd64",
                "check the archive named in /etc/apt, or NRI_NUMA_DEBIAN_MIRROR",
            )
        return versions[0]  # the lowest version is the oldest suite's

    def _forget(self, package: Package) -> None:
        with self._lock():
            self._record_file(package.label).unlink(missing_ok=True)
            shutil.rmtree(package.root, ignore_errors=True)
            if package.root.exists():
                raise TestbedUnavailable(
                    f"{package.root} is half written and cannot be removed",
                    "remove it by hand and start again",
                )

    @staticmethod
    def _parts(package: Package) -> tuple[str, Path, Path] | None:
        """(release, image, directory of the modules)."""
        for image in sorted(package.root.glob("boot/vmlinuz-*")):
            release = image.name.removeprefix("vmlinuz-")
            for lib in ("lib/modules", "usr/lib/modules"):
                modules = package.root / lib / release
                if modules.is_dir():
                    return release, image, modules
        return None

    def _measure(self, package: Package) -> _Stamp | None:
        parts = self._parts(package)
        if parts is None:
            return None
        release, image, modules = parts
        index = modules / "modules.dep"
        return _Stamp(
            release=release,
            image_bytes=image.stat().st_size,
            modules=sum(1 for _ in modules.glob("kernel/**/*.ko*")),
            index_bytes=index.stat().st_size if index.exists() else 0,
        )

    def _checked(self, package: Package) -> Kernel | None:
        try:
            stamp = msgspec.json.decode((package.root / _STAMP).read_bytes(), type=_Stamp)
        except (OSError, msgspec.MsgspecError):
            return None
        parts = self._parts(package)
        if parts is None or stamp != self._measure(package):
            return None
        release, image, _ = parts
        return Kernel(version=release, image=image, root=package.root)

    def _index(self, package: Package) -> Kernel:
        parts = self._parts(package)
        if parts is None:
            raise TestbedUnavailable(
                f"{package.package} holds no kernel with its modules",
                f"remove {package.root} and start again",
            )
        release, _, modules = parts
        base = modules.parents[2]
        try:
            done = subprocess.run(
                ["depmod", "-b", str(base), release],
                capture_output=True,
                text=True,
                check=False,
                timeout=120,
            )
        except FileNotFoundError as error:
            raise TestbedUnavailable("depmod is not on this machine", "install kmod") from error
        stamp = self._measure(package)
        if done.returncode != 0 or stamp is None or not stamp.index_bytes or not stamp.modules:
            raise TestbedUnavailable(
                f"depmod failed for {modules}: {done.stderr.strip()[-300:]}",
                f"free some space, remove {package.root} and start again",
            )
        self._replace(package.root / _STAMP, msgspec.json.encode(stamp).decode() + "\n")
        kernel = self._checked(package)
        assert kernel is not None
        return kernel
