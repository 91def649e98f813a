"""Which tests are asked about a module: those of its room, and the scenarios."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

ROOMS: Final = {
    "nri_numa/engine": (
        "tests/unit/engine",
        "tests/unit/config/test_config.py",
        "tests/scenarios",
        *(
            f"tests/properties/test_{name}.py"
            for name in (
                *("merge", "allocator", "holds", "accounting", "requested", "strict"),
                *("tenants", "rejections", "strangers"),
                *("kubelet_node", "agent_machine"),
            )
        ),
    ),
    "nri_numa/agent": ("tests/unit/agent", "tests/scenarios"),
    "nri_numa/store": (
        "tests/unit/store",
        "tests/scenarios",
        "tests/properties/test_checkpoint.py",
    ),
    "nri_numa/nri/link.py": (
        "tests/unit/nri",
        "tests/integration/test_link.py",
        "tests/integration/test_link_peers.py",
        "tests/integration/test_link_launched.py",
    ),
    **{
        f"nri_numa/{room}": (f"tests/unit/{room}",)
        for room in (
            *("publisher", "controller", "scheduler", "web", "devices", "dra", "machine", "cri"),
            "config",
        )
    },
}
"""By module or directory of modules. No test that starts a process of its own: it has no mutant."""


_STRICTEST: Final = {
    "nri_numa/engine/align": (
        "tests/unit/engine/test_as_recorded.py",
        "tests/properties/test_merge.py",
    ),
    "nri_numa/engine/cpus": (
        "tests/unit/engine/test_as_recorded.py",
        "tests/properties/test_allocator.py",
    ),
    "nri_numa/engine/request": ("tests/unit/engine/test_as_recorded.py",),
    "nri_numa/engine/accounting": ("tests/properties/test_accounting.py",),
    "nri_numa": ("tests/scenarios/test_lives_as_recorded.py",),
}


def strictest(module: str) -> tuple[str, ...]:
    """The files of tests that compare a module with all that it should do, best first."""
    return tuple(
        file for room, files in _STRICTEST.items() if module.startswith(room) for file in files
    )


def deterministic(module: str) -> bool:
    """Whether the tests of a module have no sockets, files or time that a busy machine disturbs."""
    return module.startswith("nri_numa/engine/")


def modules(repository: Path, only: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """The modules and their tests.

    `only`: modules or directories; everything when empty.
    """
    found: dict[str, tuple[str, ...]] = {}
    for room, tests in ROOMS.items():
        path = repository / room
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            if file.parent.name == "pb":
                continue  # generated
            name = file.relative_to(repository).as_posix()
            wanted = [each.rstrip("/").removesuffix(".py") + "/" for each in only]
            if not wanted or (name.removesuffix(".py") + "/").startswith(tuple(wanted)):
                found[name] = tests
    return found
