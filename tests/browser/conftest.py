"""One browser for the whole suite, and a clean tab for every test."""

import os
from collections.abc import Iterator

import pytest

from tests.beds.browser import CHROMIUM, Page, browser


@pytest.fixture(scope="session")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    if CHROMIUM is None:
        reason = "chromium is not installed (Debian's package is called chromium)"
        if os.environ.get("NRI_NUMA_REQUIRE_BROWSER") == "1":
            pytest.fail(f"{reason}, and NRI_NUMA_REQUIRE_BROWSER=1")
        pytest.skip(reason)
    with browser(tmp_path_factory.mktemp("profile")) as page:
        yield page


@pytest.fixture
def page(tab: Page) -> Iterator[Page]:
    """The tab with a blank page and nothing stored; no errors may be left afterwards."""
    tab.size(1440, 900)
    tab.open("about:blank")
    tab.wait("location.href === 'about:blank'")
    tab.errors.clear()
    tab.requests.clear()
    yield tab
    # A server that a test stopped on purpose is the one thing a browser may complain about.
    allowed = ("ERR_CONNECTION", "ERR_INCOMPLETE_CHUNKED", "ERR_EMPTY_RESPONSE", "401")
    assert [e for e in tab.errors if not any(a in e for a in allowed)] == []
