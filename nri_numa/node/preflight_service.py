"""The part of the check that looks at the systemd service: what its unit keeps it from.

The unit hides home directories (``ProtectHome=yes``) and runs without capabilities, so that a
virtual environment below one cannot be executed, whatever its permissions look like to root, and
no network namespace of a pod can be entered.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from nri_numa.config import AgentConfig
from nri_numa.node.preflight import Finding, Level

UNIT: Final = "nri-numa.service"
_DIRECTORIES: Final = ("etc/systemd/system", "run/systemd/system", "usr/lib/systemd/system")
"""Where units are, strongest first; see systemd.unit(5)."""
_HOMES: Final = ("/home/", "/root/", "/run/user/")
"""What ``ProtectHome=`` hides; see systemd.exec(5)."""
_YES: Final = ("yes", "true", "on", "1", "y", "t")
_NO: Final = ("no", "false", "off", "0", "n", "f")
_CAP_SYS_ADMIN: Final = 21
_SETTING: Final = re.compile(r"^[ \t]*(\w+)[ \t]*=[ \t]*(.*?)[ \t]*$", re.MULTILINE)
_STATUS: Final = re.compile(r"^(Uid|CapEff):\s*(\w+)", re.MULTILINE)
_LONGEST: Final = 1 << 16


def service(config: AgentConfig, root: Path = Path("/")) -> Iterator[Finding]:
    """Whether the installed service can see its program; nothing where none is installed.

    Args:
        config: the effective configuration.
        root: where /etc and the like are found; another one than / in tests.
    """
    lines = _lines(root)
    settings = dict(lines)
    if config.devices.enabled and config.devices.network:
        yield from _network(lines, root)
    program = settings.get("ExecStart", "").lstrip("-@:+!").partition(" ")[0]
    if not program.startswith("/"):
        return
    hidden = [p for p in _executed(root, program) if p.startswith(_HOMES)]
    if not hidden or settings.get("ProtectHome", "no").lower() not in (*_YES, "tmpfs"):
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


def _network(lines: list[tuple[str, str]], root: Path) -> Iterator[Finding]:
    """Whether network namespaces of pods may be entered: by the service, in a container by us."""
    if lines:
        may = _allows(
            lines, "CapabilityBoundingSet", "CAP_SYS_ADMIN", nothing=("",), everything=("~",)
        )
        may = may and _allows(
            lines, "RestrictNamespaces", "net", nothing=_YES, everything=("", *_NO)
        )
        who = UNIT
        remedy = "systemctl edit nri-numa, with [Service] CapabilityBoundingSet=CAP_SYS_ADMIN "
        remedy += "RestrictNamespaces=net on lines of their own"
    else:
        status = dict(_STATUS.findall(_read(root / "proc/self/status")))
        # For another user than root, what the agent may do is not known.
        may = status.get("Uid") != "0" or bool(int(status["CapEff"], 16) >> _CAP_SYS_ADMIN & 1)
        who = "this container"
        remedy = "Add the capability SYS_ADMIN and the host's /run/netns"
    if not may:
        yield Finding(
            subject="devices",
            level=Level.WARN,
            message=f"devices.network gives no hints: {who} may not enter the network namespaces "
            "of pods",
            remedy=f"{remedy}. Or set devices.network: false.",
        )


def _allows(
    lines: list[tuple[str, str]],
    key: str,
    word: str,
    *,
    nothing: tuple[str, ...],
    everything: tuple[str, ...],
) -> bool:
    """Whether a list of systemd.exec(5) has a word: values are merged in the order of lines."""
    allowed = full = True
    for value in (value for name, value in lines if name == key):
        listed = word in value.removeprefix("~").split()
        if value.lower() in (*nothing, *everything):
            allowed = full = value.lower() in everything
        elif value.startswith("~"):
            allowed, full = allowed and not listed, False
        else:
            allowed, full = listed or (allowed and not full), False
    return allowed


def _lines(root: Path) -> list[tuple[str, str]]:
    """Keys and values in the unit and its drop-ins; continued lines are not joined."""
    unit = next((_read(root / d / UNIT) for d in _DIRECTORIES if (root / d / UNIT).is_file()), "")
    # Drop-ins count in the order of their names, wherever they are; of equal names the first.
    drop_ins: dict[str, Path] = {}
    for directory in _DIRECTORIES:
        for path in (root / directory / f"{UNIT}.d").glob("*.conf"):
            drop_ins.setdefault(path.name, path)
    texts = [unit, *(_read(path) for _, path in sorted(drop_ins.items()))] if unit else []
    return _SETTING.findall("\n".join(texts))


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
