"""The part of the check that looks at the systemd service: can it see its own program?

The unit hides home directories (``ProtectHome=yes``) and runs without capabilities, so that a
virtual environment below one cannot be executed, whatever its permissions look like to root.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from nri_numa.node.preflight import Finding, Level

UNIT: Final = "nri-numa.service"
_DIRECTORIES: Final = ("etc/systemd/system", "run/systemd/system", "usr/lib/systemd/system")
"""Where units are, strongest first; see systemd.unit(5)."""
_HOMES: Final = ("/home/", "/root/", "/run/user/")
"""What ``ProtectHome=`` hides; see systemd.exec(5)."""
_HIDES: Final = frozenset(("yes", "true", "on", "1", "y", "t", "tmpfs"))
_SETTING: Final = re.compile(r"^[ \t]*(\w+)[ \t]*=[ \t]*(.*?)[ \t]*$", re.MULTILINE)
_LONGEST: Final = 1 << 16


def service(root: Path = Path("/")) -> Iterator[Finding]:
    """Whether the installed service can see its program; nothing where none is installed.

    Args:
        root: where /etc and the like are found; another one than / in tests.
    """
    settings = _settings(root)
    program = settings.get("ExecStart", "").lstrip("-@:+!").partition(" ")[0]
    if not program.startswith("/"):
        return
    hidden = [p for p in _executed(root, program) if p.startswith(_HOMES)]
    if not hidden or settings.get("ProtectHome", "no").lower() not in _HIDES:
        yield Finding(subject="service", level=Level.OK, message=f"{UNIT} runs {program}")
        return
    extra = " CapabilityBoundingSet=CAP_DAC_READ_SEARCH" if hidden[0].startswith("/home/") else ""
    yield Finding(
        subject="service",
        level=Level.FAIL,
        message=f"{UNIT} cannot start: {hidden[0]} is in a home directory, which "
        f"ProtectHome={settings['ProtectHome']} hides from it",
        remedy="Make the virtual environment elsewhere, in /opt/nri-numa for example. Or let the "
        f"service see home directories: systemctl edit nri-numa, with [Service] "
        f"ProtectHome=read-only{extra} on lines of their own.",
    )


def _settings(root: Path) -> dict[str, str]:
    """The last value of each key in the unit and its drop-ins; continued lines are not joined."""
    unit = next((_read(root / d / UNIT) for d in _DIRECTORIES if (root / d / UNIT).is_file()), "")
    # Drop-ins count in the order of their names, wherever they are; of equal names the first.
    drop_ins: dict[str, Path] = {}
    for directory in _DIRECTORIES:
        for path in (root / directory / f"{UNIT}.d").glob("*.conf"):
            drop_ins.setdefault(path.name, path)
    texts = [unit, *(_read(path) for _, path in sorted(drop_ins.items()))] if unit else []
    return dict(_SETTING.findall("\n".join(texts)))


def _executed(root: Path, program: str) -> Iterator[str]:
    """The files that are executed for a program: where its links lead, and its interpreter."""
    path = _resolved(root, program)
    yield path
    first = _read(root / path.lstrip("/")).partition("\n")[0]
    interpreter = first.removeprefix("#!").split()[:1] if first.startswith("#!") else []
    if interpreter:
        yield interpreter[0]
        yield _resolved(root, interpreter[0])


def _resolved(root: Path, path: str) -> str:
    real = str((root / path.lstrip("/")).resolve())
    top = str(root.resolve()).rstrip("/")
    return real.removeprefix(top) if real.startswith(f"{top}/") else real


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(_LONGEST).decode(errors="replace")
    except OSError:
        return ""
