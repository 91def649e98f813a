"""Checks the documentation's links and the built site.

``python tools/docs_check.py`` checks every link of the Markdown files inside the repository, with
anchors. ``python tools/docs_check.py --site build/site`` checks that the pages of a built site
load nothing from elsewhere and that their links and anchors lead somewhere. Addresses of other
hosts are never fetched. Needs nothing but Python.
"""

from __future__ import annotations

import re
import sys
import unicodedata
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

REPOSITORY = Path(__file__).resolve().parents[1]

_FENCE = re.compile(r"^ {0,3}(```+|~~~+)")
_LINK = re.compile(r"!?\[(?:[^\]\\]|\\.)*\]\(\s*<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\s*\)")
_HEADING = re.compile(r"^#{1,6}\s+(.*?)\s*#*$")
_ID = re.compile(r"\{[^}]*#([\w-]+)[^}]*\}\s*$")


def pages(root: Path = REPOSITORY) -> list[Path]:
    """The Markdown files that people read: at the top, below docs/, and of the tests."""
    tests = root / "tests" / "README.md"
    return [
        *sorted(root.glob("*.md")),
        *sorted((root / "docs").rglob("*.md")),
        *tests.parent.glob(tests.name),
    ]


def prose(text: str) -> Iterator[tuple[int, str]]:
    """Numbered lines outside of fenced code."""
    fence = ""
    for number, line in enumerate(text.splitlines(), 1):
        found = _FENCE.match(line)
        if found and not fence:
            fence = found[1]
        elif fence:
            if found and found[1].startswith(fence) and line.strip() == found[1]:
                fence = ""
        else:
            yield number, line


def slug(heading: str) -> str:
    """The id that MkDocs and GitHub give a heading, for the headings that we write."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
    text = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()
    text = re.sub(r"[^\w\s-]", "", text).strip().lower()
    return re.sub(r"[-\s]+", "-", text)


def anchors(text: str) -> set[str]:
    """Every id of a page; a repeated heading gets a number behind it."""
    found: set[str] = set()
    for _, line in prose(text):
        heading = _HEADING.match(line)
        if heading is None:
            continue
        given = _ID.search(heading[1])
        name = given[1] if given else slug(heading[1])
        candidate, count = name, 0
        while candidate in found:
            count += 1
            candidate = f"{name}_{count}"
        found.add(candidate)
    return found


def links(text: str) -> Iterator[tuple[int, str]]:
    """Numbered targets of links and images."""
    for number, line in prose(text):
        bare = re.sub(r"`[^`]*`", "", line)
        for match in _LINK.finditer(bare):
            yield number, match[1]


def broken_links(root: Path = REPOSITORY) -> list[str]:
    """One sentence for every link inside the repository that leads nowhere."""
    found = []
    known: dict[Path, set[str]] = {}
    for page in pages(root):
        for number, target in links(page.read_text(encoding="utf-8")):
            parts = urlsplit(target)
            if parts.scheme or parts.netloc:
                continue
            where = f"{page.relative_to(root)}:{number}: {target}"
            path = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            if not path.is_relative_to(root) or not path.exists():
                found.append(f"{where}: there is no such file")
            elif parts.fragment and path.suffix == ".md":
                if path not in known:
                    known[path] = anchors(path.read_text(encoding="utf-8"))
                if parts.fragment not in known[path]:
                    found.append(f"{where}: {path.name} has no such heading")
    return found


_LOADS = {"script": "src", "img": "src", "source": "src", "iframe": "src", "object": "data"}


class _Page(HTMLParser):
    """What a page loads, where it links, and its ids."""

    def __init__(self) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.links: list[str] = []
        self.ids: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Sort a tag's addresses."""
        given = {name: value or "" for name, value in attrs}
        if "id" in given:
            self.ids.add(given["id"])
        if tag in _LOADS and _LOADS[tag] in given:
            self.loads.append(given[_LOADS[tag]])
        if tag == "link" and given.get("rel", "") not in ("next", "prev", "canonical"):
            self.loads.append(given.get("href", ""))
        if tag == "a" and given.get("href"):
            self.links.append(given["href"])


def site_problems(site: Path) -> list[str]:
    """One sentence for everything that a page loads from elsewhere, and for broken links."""
    found: list[str] = []
    read: dict[Path, _Page] = {}
    for path in sorted(site.rglob("*.html")):
        page = read[path.resolve()] = _Page()
        page.feed(path.read_text(encoding="utf-8"))
    if not read:
        found.append(f"{site}: there are no pages")
    for path, page in read.items():
        name = path.relative_to(site.resolve())
        found += [f"{name}: loads {url}" for url in page.loads if urlsplit(url).netloc]
        for url in [*page.links, *page.loads]:
            parts = urlsplit(url)
            if parts.scheme or parts.netloc or path.name == "404.html":
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            if not target.exists():
                found.append(f"{name}: {url}: there is no such file")
            elif parts.fragment and target in read and parts.fragment not in read[target].ids:
                found.append(f"{name}: {url}: there is no such id")
    for sheet in sorted(site.rglob("*.css")):
        for url in re.findall(r"url\(\s*['\"]?([^'\")]+)", sheet.read_text(encoding="utf-8")):
            if urlsplit(url).netloc:
                found.append(f"{sheet.relative_to(site)}: loads {url}")
    return found


def main(arguments: list[str]) -> int:
    """Print what is wrong; the result is the exit code."""
    found = broken_links()
    if arguments[:1] == ["--site"]:
        found += site_problems(Path(arguments[1]))
    sys.stdout.writelines(f"{line}\n" for line in found)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
