"""What docs/quick-start.md says to an ordinary user is what happens."""

from pathlib import Path

import pytest

from tests.checks.docs_blocks import blocks, environment, make_checkout, make_programs, run


def test_every_block_without_root(tmp_path: Path) -> None:
    """In order, in one checkout: later blocks use the files of earlier ones."""
    checkout = make_checkout(tmp_path)
    env = environment(make_programs(tmp_path, {}))
    done = [block for block in blocks() if not block.root]
    assert len(done) >= 3
    for block in done:
        run(block, checkout, env)


def test_a_block_without_a_mark_is_a_mistake(tmp_path: Path) -> None:
    """So that none can be forgotten."""
    page = tmp_path / "page.md"
    page.write_text("```sh\ntrue\n```\n")
    with pytest.raises(ValueError, match="no mark"):
        blocks(page)


def test_what_is_shown_must_have_been_printed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "<!-- run: anyone -->\n```sh\necho a  b\n```\n\n<!-- shows -->\n```text\na c\n```\n"
    )
    (block,) = blocks(page)
    with pytest.raises(AssertionError, match="'a c' is not in"):
        run(block, tmp_path, environment(make_programs(tmp_path, {})))
