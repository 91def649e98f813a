"""The count of what a request enters is a count of what really happened."""

from __future__ import annotations

import subprocess
import sys

from tools.docs_regions import DOCS


def test_three_requests_are_followed_from_bytes_to_bytes() -> None:
    """In a process of its own: it listens to every call, and so may other tests."""
    done = subprocess.run(
        [sys.executable, "-m", "tools.hops"],
        capture_output=True,
        text=True,
        check=True,
        cwd=DOCS.parent,
    )
    figures, *ways = done.stdout.strip().split("\n\n")
    asked = [line.partition(":")[0] for line in figures.splitlines()]
    assert asked == ["an explicit list", "CPUs of its own under a policy", "nothing asked"]
    entered = {}
    for what, way in zip(asked, ways, strict=True):
        name, modules, _values = way.splitlines()
        assert name == what
        entered[what] = modules.removeprefix("  modules: ").split(" > ")
        assert len(set(entered[what])) == len(entered[what])
        assert f"{what}: {len(entered[what])} modules, " in figures
        order = ["nri.wire.session", "nri.conversion", "engine.admit", "store.checkpoint"]
        assert [module for module in entered[what] if module in order] == order
    assert "engine.place.explicit" in entered["an explicit list"]
    assert "engine.cpus.allocator" in entered["CPUs of its own under a policy"]
    assert len(entered["nothing asked"]) < len(entered["an explicit list"])
