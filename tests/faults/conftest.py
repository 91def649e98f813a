"""Fixtures of the fault tests: a node with the plugin as a real process."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.beds.embedded_node import Node

THOROUGH = os.environ.get("NRI_NUMA_FAULTS") == "all"
"""Every step and every byte, instead of a selection that takes a minute."""


@pytest.fixture
def directory() -> Iterator[Path]:
    """Not pytest's own: socket paths must stay short."""
    path = Path(tempfile.mkdtemp(prefix="nri-numa-fault-"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def node(directory: Path) -> Iterator[Node]:
    """A node without pods; the plugin is not started yet."""
    with Node(directory) as node:
        yield node
