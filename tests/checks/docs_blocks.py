"""The command blocks of docs/quick-start.md, and what runs them.

A comment before a block says who may run it:

    <!-- run: anyone -->             in a checkout, without root
    <!-- run: root -->               with root and a container runtime
    <!-- run: root, stays -->        goes on in a terminal of its own
    <!-- run: root, exit 1 -->       must end with this exit code
    <!-- run: root, after the plugin ended -->
                                     Ctrl-C in the other terminal comes first
    <!-- shows -->                   lines that the block before must have printed
"""

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from tools.docs_regions import DOCS

REPOSITORY = DOCS.parent

_BLOCK = re.compile(
    r"(?:<!-- (?P<mark>[^>]*) -->\n)?^```(?P<kind>\w*)\n(?P<text>.*?)^```$", re.M | re.S
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One block of commands.

    Attributes:
        shows: lines it must have printed; spaces count as one.
    """

    text: str
    root: bool
    stays: bool = False
    stops: bool = False
    code: int = 0
    shows: tuple[str, ...] = ()


def blocks(page: Path = DOCS / "quick-start.md") -> list[Block]:
    found: list[Block] = []
    for match in _BLOCK.finditer(page.read_text(encoding="utf-8")):
        mark, kind, text = match["mark"] or "", match["kind"], match["text"]
        if kind == "sh":
            who, *more = mark.removeprefix("run: ").split(", ")
            if not mark.startswith("run: ") or who not in ("anyone", "root"):
                raise ValueError(f"no mark, or an unknown one, before: {text}")
            codes = [int(word.split()[1]) for word in more if word.startswith("exit ")]
            found.append(
                Block(
                    text=text,
                    root=who == "root",
                    stays="stays" in more,
                    stops="after the plugin ended" in more,
                    code=codes[0] if codes else 0,
                )
            )
        elif mark == "shows":
            found[-1] = replace(found[-1], shows=(*found[-1].shows, *text.splitlines()))
        elif kind not in ("text", "yaml"):
            raise ValueError(f"a block of an unknown kind {kind!r}: {text}")
    return found


def make_checkout(directory: Path) -> Path:
    """A checkout to type commands in: the repository's files, and the environment of the tests."""
    checkout = directory / "nri-numa"
    checkout.mkdir()
    for entry in REPOSITORY.iterdir():
        if entry.name not in (".git", ".venv", "build", "artifacts", "site"):
            (checkout / entry.name).symlink_to(entry)
    (checkout / ".venv").symlink_to(sys.prefix)
    return checkout


def make_programs(directory: Path, programs: Mapping[str, str]) -> Path:
    """A directory for the head of PATH with programs in place of those that a test cannot have.

    ``make`` never makes the environment anew: it is the one that runs the tests.
    """
    made = directory / "bin"
    made.mkdir()
    kept = "--old-file=.venv/.installed --old-file=.venv/.node"
    everybody = {
        "make": f'#!/bin/sh\nexec /usr/bin/make {kept} "$@"\n',
        "sudo": '#!/bin/sh\nexec "$@"\n',
    }
    for name, text in {**everybody, **programs}.items():
        (made / name).write_text(text, encoding="utf-8")
        (made / name).chmod(0o755)
    return made


def environment(programs: Path, more: Mapping[str, str] | None = None) -> dict[str, str]:
    """For the commands: without what was meant for the test bed."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("NRI_NUMA_", "MAKE"))}
    path = f"{programs}:{kept.get('PATH', '/usr/sbin:/usr/bin:/sbin:/bin')}"
    return {**kept, "PATH": path, **(more or {})}


def run(block: Block, checkout: Path, env: Mapping[str, str]) -> str:
    """Execute a block as a person would type it, line by line; its output."""
    done = subprocess.run(
        ["bash", "-e", "-c", block.text],
        cwd=checkout,
        env=dict(env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,  # `make node` on a busy machine
        check=False,
    )
    assert done.returncode == block.code, f"{block.text}\n{done.stdout}"
    printed = " ".join(done.stdout.split())
    for line in block.shows:
        assert " ".join(line.split()) in printed, f"{line!r} is not in:\n{done.stdout}"
    return done.stdout
