"""Fixtures of the fault tests: a node with the plugin as a real process."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.beds.embedded_node import EmbeddedNode


@pytest.fixture
def bare(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[EmbeddedNode]:
    """A node without pods; the plugin is not started yet."""
    with EmbeddedNode(tmp_path, **getattr(request, "param", {})) as node:
        yield node


@pytest.fixture
def node(bare: EmbeddedNode) -> EmbeddedNode:
    """With the plugin, and a container of each sort."""
    bare.start()
    bare.four()
    return bare
