"""The documents as a whole: one title for each page, and no more words than were planned."""

import re
from typing import Any

import yaml

from tools.docs_check import REPOSITORY
from tools.docs_regions import DOCS

MAX_PAGES = 32
MAX_WORDS = 58_080
"""Of the pages and the files beside the code, as ``wc -w`` counts them."""
BESIDE_THE_CODE = ("README.md", "CONTRIBUTING.md", "STYLE.md", "SECURITY.md", "tests/README.md")


def navigation() -> dict[str, str]:
    """Title by page; the file has tags of Python that a safe loader does not know."""
    text = (REPOSITORY / "mkdocs.yml").read_text()
    sections: list[dict[str, list[dict[str, Any]]]] = yaml.safe_load(text[text.index("\nnav:") :])[
        "nav"
    ]
    return {
        page: title
        for section in sections
        for entries in section.values()
        for entry in entries
        for title, page in entry.items()
    }


def test_title_of_each_page_is_its_entry_in_the_navigation() -> None:
    headings = {
        path.name: re.findall(
            r"^# (.+)$", re.sub(r"```.*?```", "", path.read_text(), flags=re.S), re.M
        )
        for path in DOCS.glob("*.md")
    }
    assert headings == {page: [title] for page, title in navigation().items()}
    assert len(headings) <= MAX_PAGES


def test_each_page_is_reached_from_the_overview() -> None:
    linked = set(re.findall(r"\(([\w-]+\.md)", (DOCS / "index.md").read_text()))
    assert linked >= navigation().keys() - {"index.md"}


def test_documents_stay_within_their_words() -> None:
    paths = [*DOCS.glob("*.md"), *(REPOSITORY / name for name in BESIDE_THE_CODE)]
    assert sum(len(path.read_text().split()) for path in paths) <= MAX_WORDS
