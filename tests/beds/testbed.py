"""What every real test bed shares: the error that says it cannot be had, and where its cache is."""

from __future__ import annotations

import os
from pathlib import Path


class TestbedUnavailable(RuntimeError):
    """A real component cannot be had on this machine; a reason to skip, never a test failure."""

    __test__ = False  # pytest collects classes by their name

    def __init__(self, what: str, remedy: str) -> None:
        self.what = what
        self.remedy = remedy
        super().__init__(f"{what}; {remedy}")


def cache_dir() -> Path:
    """The folder for downloaded parts: ``$NRI_NUMA_CACHE``, else ``~/.cache/nri-numa``."""
    configured = os.environ.get("NRI_NUMA_CACHE", "")
    return Path(configured) if configured else Path.home() / ".cache" / "nri-numa"


def require_root(what_for: str) -> None:
    """Raise `TestbedUnavailable` unless we are root."""
    if os.geteuid() != 0:
        raise TestbedUnavailable(
            f"{what_for} needs root, this is uid {os.geteuid()}", "run the tests as root"
        )
