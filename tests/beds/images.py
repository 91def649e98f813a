"""Container images made on the spot, so that none is pulled: busybox, and the agent's own."""

import hashlib
import io
import json
import subprocess
import sys
import tarfile
from pathlib import Path

from nri_numa import __version__
from tools.interpreter import here

REPOSITORY = Path(__file__).resolve().parents[2]
AGENT_IMAGE = f"localhost/nri-numa:{__version__}"
"""What `build_agent_image` writes, by the name that manifests and chart have."""
# "localhost/" keeps a runtime from adding the name of a registry to the reference.
IMAGE = "localhost/nri-numa/busybox:test"

# What the test programs call; everything else is reachable as "busybox NAME".
_APPLETS = ("sh", "cat", "sleep", "true", "false", "echo", "dd", "head", "kill", "taskset")

# Process 1 of a container, and its very first act: what may this process use? Only shell built-ins
# up to the first line printed, so that no other process comes first.
FIRST_LINE_SCRIPT = (
    "while read -r key value; do case $key in "
    "Cpus_allowed_list:) cpus=$value;; Mems_allowed_list:) mems=$value;; "
    "esac; done </proc/self/status; "
    'echo "cpus=$cpus mems=$mems numa_cpus=$NUMA_CPUS numa_mems=$NUMA_MEMS"; '
    "exec sleep 1000000"
)
FIRST_LINE_COMMAND = ("/bin/sh", "-c", FIRST_LINE_SCRIPT)


def _add(archive: tarfile.TarFile, name: str, data: bytes, mode: int = 0o644) -> None:
    member = tarfile.TarInfo(name)
    member.size, member.mode = len(data), mode
    archive.addfile(member, io.BytesIO(data))


def _layer(busybox: Path) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for directory in ("bin", "etc", "proc", "sys", "dev", "tmp"):
            member = tarfile.TarInfo(directory)
            member.type, member.mode = tarfile.DIRTYPE, 0o755
            archive.addfile(member)
        _add(archive, "bin/busybox", busybox.read_bytes(), 0o755)
        for applet in _APPLETS:
            member = tarfile.TarInfo(f"bin/{applet}")
            member.type, member.linkname = tarfile.SYMTYPE, "busybox"
            archive.addfile(member)
        _add(archive, "etc/passwd", b"root:x:0:0:root:/:/bin/sh\n")
        _add(archive, "etc/group", b"root:x:0:\n")
    return buffer.getvalue()


def build_agent_image(archive: Path) -> Path:
    """Write the image of nri-numa, for this machine alone."""
    command = [sys.executable, "-m", "tools.build_image", "-o", str(archive)]
    subprocess.run(command, cwd=REPOSITORY, check=True)
    return archive


def build_image(busybox: Path, target: Path) -> Path:
    """Write a docker archive with one layer; the same input gives the same bytes.

    Returns:
        `target`.
    """
    layer = _layer(busybox)
    config = json.dumps(
        {
            "architecture": here(),
            "os": "linux",
            "created": "1970-01-01T00:00:00Z",
            # As pause image it only has to stay; as a test image the command is given each time.
            "config": {"Env": ["PATH=/bin"], "Cmd": ["/bin/sleep", "1000000"]},
            "rootfs": {
                "type": "layers",
                "diff_ids": ["sha256:" + hashlib.sha256(layer).hexdigest()],
            },
        }
    ).encode()
    config_name = hashlib.sha256(config).hexdigest() + ".json"
    manifest = [{"Config": config_name, "RepoTags": [IMAGE], "Layers": ["layer.tar"]}]
    with tarfile.open(target, mode="w") as archive:
        _add(archive, "layer.tar", layer)
        _add(archive, config_name, config)
        _add(archive, "manifest.json", json.dumps(manifest).encode())
    return target
