"""Packs what describes this machine's CPUs and NUMA nodes into one archive.

Users attach it to a bug report, so nothing that names the machine or its owner goes in: only files
on an allow-list (`nri_numa.machine.tree.NEEDED`) are read, and the two facts about ourselves that
matter, which CPUs and which memory containers may have, are written in their shortest form. Two
captures of an unchanged machine differ only in how much memory was free.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import os
import re
import tarfile
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from nri_numa.machine.cpuset import NUMASet
from nri_numa.machine.sysfs import discover
from nri_numa.machine.tree import LINKS, NEEDED, open_tree

_NUMBER = re.compile(r"\d+", re.ASCII)
_TEXT = re.compile(r"[\w\s:,()/.+-]*", re.ASCII)
"""What the files on the list consist of; anything else is not what we took it for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureReport:
    """What a capture holds.

    Attributes:
        target: the archive.
        files: names of the packed files and links, sorted.
        size_bytes: of the archive.
        left_out: how many files were seen and left out, by name with ``*`` for each number.
        unreadable: names on the list that could not be read or did not look as they should.
    """

    target: Path
    files: tuple[str, ...]
    size_bytes: int
    left_out: Mapping[str, int]
    unreadable: tuple[str, ...]


def capture(root: Path, target: Path) -> CaptureReport:
    """Pack the machine below ``root`` into ``target``, a ``.tar.gz`` that `discover` reads.

    Args:
        root: as for `discover`; an archive is packed again, without what does not belong.
        target: the archive; replaced in one step when it exists, untouched when anything fails.

    Raises:
        TopologyError: when there is no machine below ``root``.
        OSError: when ``target`` cannot be written.
    """
    tree = open_tree(root)
    topology = discover(root)
    members: dict[str, str | None] = {}  # None: a link
    left_out: Counter[str] = Counter()
    unreadable: list[str] = []
    for name in tree.walk():
        if LINKS.fullmatch(name):
            members[name] = None
        elif NEEDED.fullmatch(name):
            text = tree.read(name)
            if text is None or not _TEXT.fullmatch(text):
                unreadable.append(name)
            else:
                members[name] = text
        else:
            left_out[_NUMBER.sub("*", name)] += 1
    allowed_memory = NUMASet(topology.numa_nodes) - topology.withheld_memory
    members["proc/self/status"] = (
        f"Cpus_allowed_list:\t{topology.allowed}\nMems_allowed_list:\t{allowed_memory}"
    )
    size = _write(target, members)
    return CaptureReport(
        target=target,
        files=tuple(sorted(members)),
        size_bytes=size,
        left_out=dict(sorted(left_out.items())),
        unreadable=tuple(unreadable),
    )


def _write(target: Path, members: Mapping[str, str | None]) -> int:
    data = io.BytesIO()
    # mtime and owner of files in /sys are those of the boot and of root: noise, or a clue.
    with (
        gzip.GzipFile(fileobj=data, mode="wb", mtime=0) as zipped,
        tarfile.open(fileobj=zipped, mode="w", format=tarfile.USTAR_FORMAT) as archive,
    ):
        for name, text in sorted(members.items()):
            info = tarfile.TarInfo(name)
            link = LINKS.fullmatch(name)
            if text is None and link is not None:
                info.type = tarfile.SYMTYPE
                to_cpu = link[1].startswith("cpu")
                info.linkname = f"../../{'node/' if to_cpu else '../'}node{link[2]}"
                archive.addfile(info)
            elif text is not None:
                content = f"{text}\n".encode()
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
    content = data.getvalue()
    handle, temporary = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.chmod(temporary, 0o644)  # mkstemp's 0600 would keep the user from attaching root's file
        os.replace(temporary, target)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    return len(content)
