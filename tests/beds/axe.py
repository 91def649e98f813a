"""axe-core, which finds what keeps people with assistive technology out; fetched once by npm.

It is a tool of the tests and is not shipped, so it is not in the repository: a package of npm's
registry, kept in the cache directory of the user who runs the tests.
"""

import os
import shutil
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest

from tests.beds.browser import Page

VERSION = "4.10.3"
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "nri-numa" / "axe"


def axe_source() -> str:
    """The program's text; skips the test where it is not cached and npm cannot fetch it."""
    archive = CACHE / f"axe-core-{VERSION}.tgz"
    if not archive.exists():
        npm = shutil.which("npm")
        reason = "npm is not installed" if npm is None else ""
        if npm is not None:
            CACHE.mkdir(parents=True, exist_ok=True)
            done = subprocess.run(
                [npm, "pack", "--silent", f"axe-core@{VERSION}"],
                cwd=CACHE,
                capture_output=True,
                text=True,
                timeout=120,
                check=False,
            )
            reason = f"npm cannot fetch it: {done.stderr.strip()[-200:]}" if done.returncode else ""
        if reason:
            if os.environ.get("NRI_NUMA_REQUIRE_AXE") == "1":
                pytest.fail(f"axe-core is required: {reason}")
            pytest.skip(f"axe-core is not there: {reason}")
    with tarfile.open(archive) as package:
        member = package.extractfile("package/axe.min.js")
        assert member is not None
        return member.read().decode()


def findings(page: Page, source: str) -> list[str]:
    """What axe-core finds wrong with the page as it is now, a line for each element.

    All its rules run: WCAG 2.0 to 2.2, levels A and AA, and what it calls best practice.
    """
    page.run(f"{source}; void 0")
    options = {"resultTypes": ["violations"], "rules": {"target-size": {"enabled": True}}}
    found: list[dict[str, Any]] = page.run(
        f"axe.run(document, {options!r})".replace("True", "true")
        + ".then(r => r.violations.map(v => ({id: v.id, impact: v.impact, help: v.help,"
        " nodes: v.nodes.slice(0, 5).map(n => n.html.slice(0, 160) + ' | '"
        " + (n.any[0] || n.all[0] || n.none[0] || {}).message)})))"
    )
    return [f"{v['id']} ({v['impact']}): {v['help']}: {n}" for v in found for n in v["nodes"]]
