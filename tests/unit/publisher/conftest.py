"""Time passes when a test says so."""

from tests.beds.stepped_loop import pytest_asyncio_loop_factories as pytest_asyncio_loop_factories
