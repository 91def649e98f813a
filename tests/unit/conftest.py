"""What units of several rooms need."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.beds.cgroup_bed import real as real
from tests.beds.cgroup_bed import tree as tree
from tests.beds.systemd_bus import systemd as systemd


@pytest.fixture
def directory() -> Iterator[Path]:
    """A directory for sockets: their paths end at 107 bytes, which ``tmp_path`` may pass."""
    with tempfile.TemporaryDirectory(prefix="nn-") as name:
        yield Path(name)
