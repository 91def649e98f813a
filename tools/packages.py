"""The bundle with its own interpreter, for nodes of any distribution, and .deb and .rpm of it.

The bundle runs wherever it is unpacked: its programs are scripts that start its interpreter with
its own C library. The packages hold it below /usr/lib/nri-numa, with the unit, the configuration
and completion for bash. Neither starts the service, and an upgrade restarts one that runs.
"""

from __future__ import annotations

import gzip
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Final

from tools import interpreter
from tools.addresses import addresses
from tools.build_image import EPOCH, REPOSITORY, SITE, Rootfs, unpack, version

_HOME: Final = "usr/lib/nri-numa"
_SUMMARY: Final = "NUMA placement for Kubernetes nodes, an NRI plugin"
_TEXT: Final = "Pins containers to CPUs and memory nodes before their first instruction."
_SUGGESTED_PACKAGE: Final = "python3-pip"
"""By which numpy gets to the interpreter of the bundle, for ``nri-numa measure``."""
_CONFIG: Final = "/etc/nri-numa/agent.yaml"
_UNITS: Final = sorted((REPOSITORY / "systemd").glob("nri-numa.*"))
# The interpreter finds its library beside the name it was called by, and what it starts calls that.
_PYTHON: Final = """#!/bin/sh
here=$(dirname "$(readlink -f "$0")")/..
exec "$here/{linker}" --library-path "$here/usr/lib/{machine}-linux-gnu" \\
  --argv0 "$here/usr/bin/python3" "$here/usr/bin/python{python}" "$@"
"""
_PROGRAM: Final = """#!/bin/sh
here=$(dirname "$(readlink -f "$0")")/..
exec "$here/bin/python3" -I -m nri_numa "$@"
"""
# Where systemd runs; dpkg names another root than / in the variable.
_SYSTEMD: Final = 'if [ -d "$DPKG_ROOT/run/systemd/system" ]; then systemctl %s || :; fi\n'
_RELOAD: Final = _SYSTEMD % "daemon-reload"
_RESTART: Final = _SYSTEMD % "try-restart nri-numa"
_STOP: Final = _SYSTEMD % "disable --now nri-numa"


def bundle(programs: Rootfs, architecture: str) -> Rootfs:
    """What an archive of the bundle holds, without the folder at its top."""
    (linker,) = (
        path for path in programs.files() if path.rpartition("/")[2].startswith("ld-linux-")
    )
    machine = interpreter.ARCHITECTURES[architecture]
    made = programs.under("")
    python = _PYTHON.format(linker=linker, machine=machine, python=interpreter.PYTHON)
    made.add("bin/python3", python.encode(), 0o755)
    made.add("usr/bin/python3", python.replace("/..\n", "/../..\n").encode(), 0o755)
    made.add("bin/nri-numa", _PROGRAM.encode(), 0o755)
    made.add("usr/lib/python3/dist-packages/nri-numa.pth", f"../../../../{SITE}\n".encode())
    return made


def _units(program: str) -> dict[str, bytes]:
    """The service, and the socket without which it has no HTTP, by name."""
    texts = {path.name: path.read_text(encoding="utf-8") for path in _UNITS}
    return {
        name: text.replace("/usr/local/bin/nri-numa", program).encode()
        for name, text in texts.items()
    }


def archive(made: Rootfs) -> bytes:
    """The bundle to unpack anywhere, with unit and configuration beside it."""
    files = made.under(f"nri-numa-{version()}")
    for name, unit in _units("/usr/local/bin/nri-numa").items():
        files.add(f"nri-numa-{version()}/{name}", unit)
    config = (REPOSITORY / "config" / "agent.yaml").read_bytes()
    files.add(f"nri-numa-{version()}/agent.yaml", config)
    return gzip.compress(files.tar(), 9, mtime=EPOCH)


def _installed(made: Rootfs) -> Rootfs:
    from click.shell_completion import BashComplete

    from nri_numa.cli import cli

    files = made.under(_HOME)
    files.add(_CONFIG, (REPOSITORY / "config" / "agent.yaml").read_bytes())
    for name, unit in _units("/usr/bin/nri-numa").items():
        files.add(f"usr/lib/systemd/system/{name}", unit)
    completion = BashComplete(cli, {}, "nri-numa", "_NRI_NUMA_COMPLETE").source()
    files.add("usr/share/bash-completion/completions/nri-numa", completion.encode())
    files.add("usr/share/doc/nri-numa/copyright", (REPOSITORY / "LICENSE").read_bytes())
    files.link("usr/bin/nri-numa", f"/{_HOME}/bin/nri-numa")
    return files


def deb(made: Rootfs, architecture: str) -> bytes:
    """The package for dpkg, by hand: three members of an ar archive."""
    files = _installed(made)
    size = sum(map(len, files.files().values())) // 1024
    maintainer = f"nri-numa <{addresses()['homepage']}>"
    upgraded = f'if [ "$1" = configure ] && [ -n "$2" ]; then {_RESTART.strip()}; fi\n'
    control = Rootfs()
    control.add(
        "./control",
        f"Package: nri-numa\nVersion: {version()}\nArchitecture: {architecture}\n"
        f"Maintainer: {maintainer}\nInstalled-Size: {size}\nSection: admin\nPriority: optional\n"
        f"Suggests: {_SUGGESTED_PACKAGE}\n"
        f"Homepage: {addresses()['homepage']}\nDescription: {_SUMMARY}\n {_TEXT}\n".encode(),
    )
    control.add("./conffiles", f"{_CONFIG}\n".encode())
    stopped = f'if [ "$1" = remove ]; then {_STOP.strip()}; fi\n'
    for name, script in (
        ("postinst", _RELOAD + upgraded), ("prerm", stopped), ("postrm", _RELOAD),
    ):  # fmt: skip
        control.add(f"./{name}", f"#!/bin/sh\nset -e\n{script}".encode(), 0o755)
    members = {
        "debian-binary": b"2.0\n",
        "control.tar.gz": gzip.compress(control.tar(), 9, mtime=EPOCH),
        "data.tar.gz": gzip.compress(files.tar(), 9, mtime=EPOCH),
    }
    packed = b"!<arch>\n"
    for name, data in members.items():
        packed += f"{name:16}{EPOCH:<12}0     0     100644  {len(data):<10}`\n".encode() + data
        packed += b"\n" * (len(data) % 2)
    return packed


def rpm(made: Rootfs, architecture: str) -> bytes:
    """The package for rpm, made by rpmbuild.

    Raises:
        SystemExit: there is no rpmbuild.
    """
    if shutil.which("rpmbuild") is None:
        raise SystemExit("rpmbuild is not on this machine: on Debian, apt-get install rpm")
    files = _installed(made)
    machine = interpreter.ARCHITECTURES[architecture]
    with tempfile.TemporaryDirectory() as scratch:
        tree = Path(scratch, "tree")
        unpack(files.tar(), tree)
        Path(scratch, "nri-numa.spec").write_text(
            f"""Name: nri-numa
Version: {version()}
Release: 1
Summary: {_SUMMARY}
License: Apache-2.0
URL: {addresses()["homepage"]}
AutoReqProv: no
Suggests: {_SUGGESTED_PACKAGE}
%description
{_TEXT}
%install
cp -a {tree}/. %{{buildroot}}/
%post
{_RELOAD}
%preun
if [ "$1" = 0 ]; then {_STOP.strip()}; fi
%postun
{_RELOAD}if [ "$1" -ge 1 ]; then {_RESTART.strip()}; fi
%files
%config(noreplace) {_CONFIG}
/{_HOME}
/usr/bin/nri-numa
/usr/lib/systemd/system/nri-numa.*
/usr/share/bash-completion/completions/nri-numa
/usr/share/doc/nri-numa
""",
            encoding="utf-8",
        )
        options = {
            "_topdir": scratch,
            "_rpmdir": scratch,
            "_rpmfilename": "made.rpm",
            "_buildhost": "localhost",
            "use_source_date_epoch_as_buildtime": "1",
            "clamp_mtime_to_source_date_epoch": "1",
            "_build_id_links": "none",
            "__os_install_post": "%{nil}",
            "debug_package": "%{nil}",
            "_binary_payload": "w9.gzdio",
            "_source_filedigest_algorithm": "8",
            "_binary_filedigest_algorithm": "8",
        }
        defined = [word for key, text in options.items() for word in ("--define", f"{key} {text}")]
        command = ["rpmbuild", "-bb", "--quiet", "--target", f"{machine}-linux"]
        subprocess.run(  # noqa: S603
            [*command, *defined, f"{scratch}/nri-numa.spec"],
            check=True,
            # What rpm reads of the user would be another machine's.
            env={"PATH": os.environ["PATH"], "HOME": scratch, "SOURCE_DATE_EPOCH": "315532800"},
            stderr=subprocess.DEVNULL,
        )
        return Path(scratch, "made.rpm").read_bytes()
