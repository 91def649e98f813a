"""The documents as a whole: titles, words, and links that lead somewhere."""

import re
from pathlib import Path
from typing import Any

import yaml

from tools.docs_check import REPOSITORY, broken_links, site_problems
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


def test_no_link_of_the_documentation_is_broken() -> None:
    assert broken_links() == []


def test_broken_links_and_anchors_are_found(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text(
        "# Top\n[a](docs/one.md#the-second-part) [b](docs/none.md)\n"
        "`[code](nowhere.md)`\n```\n[code](nowhere.md)\n```\n[out](https://example.org/x)\n"
    )
    (tmp_path / "docs/one.md").write_text(
        "# One\n## The *second* part\n[c](#no-such) [d](../README.md#top) [e](../../outside.md)\n"
    )
    found = broken_links(tmp_path)
    assert [line.rpartition(": ")[0] for line in found] == [
        "README.md:2: docs/none.md",
        "docs/one.md:3: #no-such",
        "docs/one.md:3: ../../outside.md",
    ]


def test_what_a_page_loads_from_elsewhere_is_found(tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text(
        '<link rel="stylesheet" href="//cdn.example/x.css"><script src="a.js"></script>'
        '<a href="https://example.org">fine</a><a href="#none">x</a><h1 id="top">t</h1>'
        '<a href="#top">y</a>'
    )
    (tmp_path / "a.css").write_text("b{background:url('https://cdn.example/y.png')}")
    assert site_problems(tmp_path) == [
        "index.html: loads //cdn.example/x.css",
        "index.html: #none: there is no such id",
        "index.html: a.js: there is no such file",
        "a.css: loads https://cdn.example/y.png",
    ]


ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/security.md").read_text()


def test_each_test_that_stands_for_a_sentence_is_there() -> None:
    texts = [path.read_text() for path in (ROOT / "tests").rglob("test_*.py")]
    there = set(re.findall(r"def (test_\w+)\(", "".join(texts)))
    assert set(re.findall(r"`(test_\w+)`", PAGE)) <= there
