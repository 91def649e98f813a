"""Links inside the documentation lead somewhere; the checker finds those that do not."""

from pathlib import Path

from tools.docs_check import broken_links, site_problems


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
