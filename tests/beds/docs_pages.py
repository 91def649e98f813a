"""Pages of the documentation, and what tests are called by."""

from pathlib import Path

from tools.docs_check import pages

PAGES = [page for page in pages() if page.name != "CHANGELOG.md"]


def page_id(path: object) -> str:
    return path.name if isinstance(path, Path) else str(path)
