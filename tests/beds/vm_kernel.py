"""A Debian kernel in the cache: downloaded once, and indexed.

The full ``linux-image-<version>-amd64`` (or ``-arm64``) is taken, because the one for clouds has no
9p. Nothing is installed; virtme-ng finds the modules beside the kernel.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from tests.beds.debs import DebCache, Package, Wanted
from tests.beds.testbed import TestbedUnavailable, run

_LABEL = "linux-image"
# bookworm's kernel is the oldest one in support, so what works there works on later ones, too.
_SUITES = ("bookworm", "trixie", "sid")
_STAMP = "nri-numa-bed.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """A kernel that can be booted; `image` lies below `root`, its modules, too."""

    version: str
    image: Path
    root: Path


class KernelCache(DebCache):
    """The kernel's package beside the other packages of the cache."""

    def kernel(self, series: str = "") -> Kernel:
        """The kernel, downloaded where it is missing or damaged.

        Args:
            series: ``6.12``; empty: the oldest.
        """
        label = f"{_LABEL}-{series}" if series else _LABEL
        package = self.cached(label)
        if package is None:
            name = self._package_name(series)
            (package,) = self.fetch(Wanted(label=label, package=name, suites=_SUITES))
        return self._indexed(package)

    # -- steps -----------------------------------------------------------------------------

    def _package_name(self, series: str) -> str:
        """What the meta package ``linux-image-amd64`` stands for now."""
        kind = self.architecture or "amd64"
        with self._lock():
            self._update_lists()
            text = self._apt("apt-cache", "show", "--all-versions", f"linux-image-{kind}")
        names = re.findall(rf"^Depends:.*?\b(linux-image-[0-9][^ ,]*-{kind})\b", text, re.MULTILINE)
        versions: list[str] = sorted(
            {name for name in names if name.startswith(f"linux-image-{series}")},
            key=lambda name: [int(part) for part in re.findall(r"\d+", name)],
        )
        if not versions:
            raise TestbedUnavailable(
                f"the Debian archive names no linux-image for {kind}",
                "check the archive named in /etc/apt, or NRI_NUMA_DEBIAN_MIRROR",
            )
        return versions[0]  # the lowest version is the oldest suite's

    def _indexed(self, package: Package) -> Kernel:
        """The kernel with the index of its modules, which is made once."""
        for image in sorted(package.root.glob("boot/vmlinuz-*")):
            release = image.name.removeprefix("vmlinuz-")
            for lib in ("lib/modules", "usr/lib/modules"):
                modules = package.root / lib / release
                if modules.is_dir():
                    self._index(modules, package.root / _STAMP)
                    return Kernel(version=release, image=image, root=package.root)
        raise TestbedUnavailable(
            f"{package.package} holds no kernel with its modules",
            f"remove {package.root} and start again",
        )

    def _index(self, modules: Path, stamp: Path) -> None:
        if stamp.exists():
            return
        remedy = "install kmod, or free some space"
        run("depmod", "-b", modules.parents[2], modules.name, remedy=remedy, timeout_s=120)
        self._replace(stamp, "{}\n")  # last: a half-written index has none
