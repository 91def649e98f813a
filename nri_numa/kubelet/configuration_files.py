"""Finds and reads the kubelet's configuration: its command line, its file, its drop-ins.

`/configz` would be the truth, and is not asked: it takes credentials, and the agent that runs as
root on the node has none. Everything here happens in a thread, never while a request waits.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from nri_numa.kubelet import regular_file
from nri_numa.kubelet.configuration import Flags, KubeletFacts, command_line, facts, merged

MAX_FILES: Final = 200
"""Drop-ins that are read; more is the wrong directory."""
AUTO: Final = "auto"
OFF: Final = "off"


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The kubelet's configuration as it is now.

    Attributes:
        path: of its file as the kubelet names it; empty when there is none.
        facts: what it says; None when there is none.
        problems: sentences about what could not be read.
        signature: of everything that was read; equal ones mean that nothing changed.
        running: whether the command line of a running kubelet was followed.
    """

    path: str = ""
    facts: KubeletFacts | None = None
    problems: tuple[str, ...] = ()
    signature: tuple[object, ...] = ()
    running: bool = False


def read(config: str, config_dir: str, kubelet_root: str, proc: str = "/proc") -> Found:
    """Read it.

    Args:
        config: path of the file, ``auto`` or ``off``.
        config_dir: directory of drop-ins; empty for none, or for what the command line says.
        kubelet_root: the kubelet's directory as we see it; tells our kubelet from others.
        proc: where processes are found.
    """
    if config == OFF:
        return Found()
    flags, prefix, running = Flags(), "", None
    if config == AUTO:
        running = _process(kubelet_root, proc)
        if running is not None:
            flags, prefix = running
            path, directory = flags.config, flags.config_dir or config_dir
        else:
            path = os.path.join(kubelet_root, "config.yaml")  # where kubeadm puts it
            directory = config_dir
            if not os.path.exists(path):
                return Found()
    else:
        path, directory = config, config_dir
    documents: list[tuple[str, object]] = []
    problems: list[str] = []
    signature: list[object] = [path, directory, tuple(sorted(flags.values.items()))]
    drop_ins: list[str] = []
    if directory:
        try:
            drop_ins = sorted(_drop_ins(prefix + directory, len(prefix)))
        except OSError as error:
            problems.append(f"{directory}: cannot be read: {error.strerror or error}")
    if len(drop_ins) > MAX_FILES:
        problems.append(f"{directory}: has {len(drop_ins)} drop-ins, expected at most {MAX_FILES}")
    for name in (*((path,) if path else ()), *drop_ins[:MAX_FILES]):
        try:
            data, seen = regular_file.read(prefix + name)
            text = data.decode()
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            problems.append(f"{name}: cannot be read: {why}")
            continue
        signature.append((name, seen))
        try:
            documents.append((name, _parsed(text)))
        except ValueError as error:
            problems.append(f"{name}: {error}")
    whole, left_out = merged(documents)
    known = facts(whole, flags.values)
    return Found(
        path=path or "command line",
        facts=known if whole or flags.values else None,
        problems=(*problems, *left_out, *known.problems),
        signature=(*signature, *problems),
        running=running is not None,
    )


def _process(kubelet_root: str, proc: str) -> tuple[Flags, str] | None:
    """Command line of the kubelet that uses this directory, and the prefix of its paths.

    There may be others (nested clusters, tests): the one whose directory is the one we see.
    """
    try:
        ours = os.stat(kubelet_root)
    except OSError:
        return None
    for entry in sorted(os.listdir(proc)) if os.path.isdir(proc) else ():
        if not entry.isdigit():
            continue
        base = os.path.join(proc, entry)
        try:
            with open(os.path.join(base, "cmdline"), "rb") as file:
                words = file.read(regular_file.MAX_BYTES).decode(errors="replace").split("\0")
            if os.path.basename(words[0]) != "kubelet":
                continue
            flags = command_line(words)
            theirs = os.stat(os.path.join(base, "root") + flags.root_dir)
        except OSError:
            continue  # it ended meanwhile, or we may not look
        if (theirs.st_dev, theirs.st_ino) == (ours.st_dev, ours.st_ino):
            return flags, os.path.join(base, "root")
    return None


def _drop_ins(directory: str, skip: int) -> Iterator[str]:
    """Paths of ``*.conf`` files, subdirectories included, without the first ``skip`` characters."""

    def fail(error: OSError) -> None:
        raise error

    for base, _, names in os.walk(directory, onerror=fail):
        yield from (os.path.join(base, name)[skip:] for name in names if name.endswith(".conf"))


def _parsed(text: str) -> object:
    """The document of a file in YAML or JSON.

    Raises:
        ValueError: with what was expected.
    """
    from nri_numa.config import yaml_reader

    return yaml_reader.parse(text)
