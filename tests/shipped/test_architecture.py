"""The architecture page says where things are, and they are there; decisions have one form."""

import re
from functools import cache
from pathlib import Path

import pytest

from tests.beds.docs_pages import PAGES, page_id
from tools import docs_rooms
from tools.docs_regions import DOCS

ROOT = DOCS.parent
PACKAGE = ROOT / "nri_numa"
RECORDS = sorted((DOCS / "adr").glob("*.md"))
CODE = re.compile(r"`([^`\n]+)`")
EXTENSIONS = r"(?:py|md|yaml|toml|js|css|html|svg|proto|ini)"


def test_the_drawing_is_of_this_code() -> None:
    assert docs_rooms.DRAWING.read_text() == docs_rooms.svg(), "run python -m tools.docs_regions"


def test_files_that_the_page_names_exist() -> None:
    """Paths there are below nri_numa/, unless they begin with a directory at the top."""
    for word in CODE.findall((DOCS / "architecture.md").read_text()):
        if re.fullmatch(rf"(\w+/)+(\w+\.{EXTENSIONS})?", word):
            assert (PACKAGE / word).exists() or (ROOT / word).exists(), word


@cache
def sources() -> list[str]:
    tops = ("bench", "nri_numa", "proto", "tests", "tools")
    return [str(path.relative_to(ROOT)) for top in tops for path in (ROOT / top).rglob("*.py")]


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_sources_that_pages_name_exist(page: Path) -> None:
    """A path with a directory is in the tree, from the top, the package or the page's own words."""
    for word in re.findall(r"(?<![\w/.<-])((?:\w+/)+\w+\.py|\w+\.py)\b", page.read_text()):
        assert any(path == word or path.endswith(f"/{word}") for path in sources()), word


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_files_of_the_checkout_and_dotted_names_exist(page: Path) -> None:
    """Paths that begin with one of the repository's own directories."""
    text = page.read_text()
    tops = "tests|bench|config|tools|nri_numa|systemd"
    for word in re.findall(rf"(?<![\w/.-])((?:{tops})/\w[\w./-]*\w)", text):
        assert (ROOT / word).exists(), word
    for word in re.findall(r"(?<![\w/.-])nri_numa\.(\w+(?:\.\w+)*)", text):
        path = PACKAGE.joinpath(*word.split("."))
        if not path.is_dir() and not path.with_suffix(".py").is_file():
            module = path.parent.with_suffix(".py")  # then the name is what a module defines
            assert module.is_file(), f"nri_numa.{word}"
            assert re.search(rf"\b{path.name}\b", module.read_text()), f"nri_numa.{word}"


@pytest.mark.parametrize("record", RECORDS, ids=page_id)
def test_a_decision_record_has_the_form_of_all(record: Path) -> None:
    lines = record.read_text().splitlines()
    assert re.fullmatch(r"# (?!\d).+", lines[0]), "a title without a number: the file has it"
    assert lines[1] == ""
    assert re.match(
        r"Status: (accepted|superseded by \[\d{4}\]\(\S+\)), \d{4}-\d\d-\d\d\b", lines[2]
    )
    headings = [line for line in lines if line.startswith("## ")]
    assert headings == ["## Context", "## Decision", "## Consequences"]


def test_no_two_decision_records_have_one_number() -> None:
    numbers = [record.name[:4] for record in RECORDS]
    assert len(set(numbers)) == len(numbers)
