"""Sizes and start times of what `make release` made: ``python -m tools.sizes build/release``.

A start is ``nri-numa check --help`` (interpreter, command line, one command), the best of five;
the image's is in its root file system, without a runtime (root). A bundle of another architecture
is started where the kernel has QEMU for it (qemu-user-static).
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tools.build_image import assemble, programs, unpack
from tools.docs_regions import table
from tools.interpreter import ARCHITECTURES, here


def _best(*command: str) -> str:
    """Milliseconds of the fastest of five, in wall-clock time."""
    took = []
    for _ in range(5):
        began = time.perf_counter()
        subprocess.run([*command, "check", "--help"], check=True, stdout=subprocess.DEVNULL)  # noqa: S603
        took.append(time.perf_counter() - began)
    return f"{min(took) * 1000:.0f} ms"


def main() -> int:
    """Print both tables."""
    folder = Path(sys.argv[1] if sys.argv[1:] else "build/release")
    if not folder.is_dir():
        sys.exit(f"{folder} is not there: make release first")
    rows = [
        (path.name, f"{path.stat().st_size / 1e6:.1f} MB")
        for path in sorted(folder.iterdir())
        if path.stat().st_size > 50_000
    ]
    sys.stdout.write("\n".join(table(("file", "size"), rows)) + "\n\n")
    starts = [("wheel, in this environment", _best(str(Path(sys.executable).parent / "nri-numa")))]
    with tempfile.TemporaryDirectory() as scratch:
        for packed in sorted(folder.glob("*-linux-*.tar.gz")):
            architecture = packed.name.rpartition("-")[2].partition(".")[0]
            rule = Path("/proc/sys/fs/binfmt_misc", f"qemu-{ARCHITECTURES[architecture]}")
            if architecture != here() and not rule.exists():
                continue
            unpack(packed, f"{scratch}/{architecture}")
            (program,) = Path(scratch, architecture).glob("*/bin/nri-numa")
            emulated = "" if architecture == here() else ", emulated"
            starts.append((f"bundle of {architecture}{emulated}", _best(str(program))))
        if os.geteuid() == 0:
            unpack(assemble(programs(here())).tar(), f"{scratch}/image")
            inside = _best("chroot", f"{scratch}/image", "/usr/local/bin/nri-numa")
            starts.append(("image", inside))
    sys.stdout.write("\n".join(table(("what", "start"), starts)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
