"""A whole Debian with systemd as its first process: image, first file system, command line of QEMU.

The image is made once, by debootstrap, and kept in the cache; what a machine writes goes to a file
of its own that ends with it. What is tested comes from the checkout, which the guest mounts
read-only at ``/opt/nri-numa``, where docs/install-node.md puts one.
"""

import lzma
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Final

from tests.beds.debs import BUSYBOX, machine_mirror
from tests.beds.testbed import cache_dir, require_root, run
from tests.beds.vm_kernel import Kernel, KernelCache
from tests.machines.vm_machine import Machine, qemu_options
from tools.interpreter import platforms

REPOSITORY = Path(__file__).resolve().parents[2]
CHECKOUT: Final = Path("/opt/nri-numa")
VENV: Final = Path("/opt/venv")
SHARED: Final = Path("/run/out")
CACHE: Final = Path("/run/cache")
_PYTHON: Final = {"trixie": "3.13", "arm64-trixie": "3.13", "bookworm": "3.11"}
_KERNEL: Final = {"trixie": "6.12", "arm64-trixie": "6.12", "bookworm": "6.1"}
_PACKAGES: Final = (
    *("systemd", "systemd-sysv", "dbus", "udev", "kmod", "procps", "iproute2"),
    *("python3", "python3-venv", "runc", "crun", "containerd", "busybox-static"),
)
_FIRST: Final = ("virtio_pci", "virtio_blk", "crc32c_generic", "ext4")
"""Modules that the root needs; all others are in the image."""
_IMAGE_BYTES: Final = 3_000_000_000  # sparse
_NO_SERVICES: Final = (
    *("containerd.service", "systemd-timesyncd.service", "systemd-pstore.service"),
    *("apt-daily.timer", "apt-daily-upgrade.timer", "dpkg-db-backup.timer", "fstrim.timer"),
    *("e2scrub_all.timer", "e2scrub_reap.service", "getty@tty1.service", "motd-news.timer"),
    *("systemd-udevd.service", "systemd-udev-trigger.service", "serial-getty@ttyS0.service"),
    *("systemd-udevd-control.socket", "systemd-udevd-kernel.socket"),
    *("systemd-firstboot.service", "ldconfig.service", "systemd-networkd.service"),
)
_HOSTS: Final = "127.0.0.1 localhost node-1\n"
_9P: Final = "trans=virtio,version=9p2000.L,msize=512000"
_FSTAB: Final = f"""checkout {CHECKOUT} 9p {_9P},cache=loose,ro 0 0
cache {CACHE} 9p {_9P},cache=loose,ro,x-mount.mkdir 0 0
out {SHARED} 9p {_9P},x-mount.mkdir 0 0
"""
_UNIT: Final = f"""[Unit]
Description=Runs cases
RequiresMountsFor={CHECKOUT} {SHARED} {CACHE}
Wants=dbus.socket
After=dbus.socket
[Service]
ExecStart=/bin/sh {SHARED}/start
ExecStopPost=/bin/systemctl poweroff --force --no-block
StandardOutput=append:{SHARED}/guest.log
StandardError=append:{SHARED}/guest.log
KillMode=process
"""
_INIT: Final = """#!/bin/busybox sh
/bin/busybox mount -t proc proc /proc
/bin/busybox mount -t devtmpfs dev /dev
for module in $(/bin/busybox cat /modules/order); do /bin/busybox insmod /modules/$module; done
until [ -b /dev/vda ]; do /bin/busybox usleep 10000; done
/bin/busybox mount -t ext4 /dev/vda /root
/bin/busybox umount /proc
/bin/busybox mount --move /dev /root/dev
exec /bin/busybox switch_root /root /sbin/init
"""
_COMPILE: Final = ("/usr/bin/python3", "-m", "compileall", "-q")
_PROGRAM: Final = f"""#!{VENV}/bin/python -I
import sys
sys.path.insert(0, "{CHECKOUT}")
from nri_numa.cli import main
sys.exit(main())
"""


_run = partial(run, remedy="see what it says; packages debootstrap and e2fsprogs are needed")


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """What one release of Debian is booted from."""

    release: str
    image: Path
    initrd: Path
    kernel: Kernel


def system(release: str) -> System:
    """An image, made where it is missing: minutes."""
    debs = KernelCache(architecture=release.rpartition("-")[0])
    kernel = debs.kernel(_KERNEL[release])
    directory = cache_dir() / "systems"
    pinned = (REPOSITORY / "requirements/runtime.txt").read_text()
    parts = (
        _PACKAGES,
        _FIRST,
        _NO_SERVICES,
        _HOSTS,
        _FSTAB,
        _UNIT,
        _INIT,
        _PROGRAM,
        _COMPILE,
        kernel.version,
    )
    recipe = sha256(repr((*parts, pinned)).encode()).hexdigest()
    image = directory / f"{release}-{recipe[:12]}.img"
    initrd = directory / f"{release}-{recipe[:12]}.initrd"
    if not image.exists():
        require_root("an image of Debian")
        directory.mkdir(parents=True, exist_ok=True)
        for old in (*directory.glob(f"{release}-*.img"), *directory.glob(f"{release}-*.initrd")):
            old.unlink()
        tree = bootstrapped(release)
        (there,), (here,) = debs.fetch(BUSYBOX), KernelCache().fetch(BUSYBOX)
        busybox, packs = (next(each.root.glob("**/bin/busybox")) for each in (there, here))
        _make_initrd(kernel, busybox, packs, initrd)
        _make_image(release, tree, kernel, image)
    # The guest cannot write into the checkout, and would compile at each start of a program.
    suite = release.rpartition("-")[2]
    python = inside(bootstrapped(suite))
    _run(*python, *_COMPILE, "nri_numa", "tests")
    return System(release=release, image=image, initrd=initrd, kernel=kernel)


def bootstrapped(release: str) -> Path:
    """The packages of the release, as debootstrap leaves them; kept for the next image."""
    tree = cache_dir() / "systems" / f"{release}.tree"
    done = tree.with_suffix(".done")
    architecture, _, suite = release.rpartition("-")
    if not done.exists() or done.read_text() != " ".join(_PACKAGES):
        shutil.rmtree(tree, ignore_errors=True)
        include = f"--include={','.join(_PACKAGES)}"
        words = ("debootstrap", "--variant=minbase", include)
        if architecture:
            # Its scripts would be run by QEMU, for an hour: what they write is here already.
            here = bootstrapped(suite)
            tree.mkdir()
            _run("cp", "-a", f"{here}/.", tree)  # not as a link, where it is one
            (tree / "etc/ld.so.cache").unlink()
            more = (f"--arch={architecture}", "--download-only")
            with tempfile.TemporaryDirectory(dir=tree.parent) as debs:
                _run(*words, *more, suite, debs, machine_mirror().uri)
                for deb in sorted(Path(debs).glob("var/cache/apt/archives/*.deb")):
                    _run("dpkg-deb", "-x", deb, tree)
        else:
            _run(*words, suite, tree, machine_mirror().uri)
        done.write_text(" ".join(_PACKAGES))
    return tree


def inside(root: Path) -> list[str]:
    """The words before a command that runs it below another root, in this checkout.

    Nothing is written below that root, and nothing of it stays mounted.
    """
    if root == Path("/"):
        return []
    script = (
        'set -e; d=$(mktemp -d); mount -t tmpfs none "$d"; mkdir "$d/u" "$d/w" "$d/r"; r=$d/r\n'
        'mount -t overlay -o "lowerdir=$1,upperdir=$d/u,workdir=$d/w" none "$r"\n'
        'for one in proc sys dev; do mount --rbind "/$one" "$r/$one"; done\n'
        'mount -t tmpfs none "$r/tmp"; mkdir -p "$r$2"; mount --rbind "$2" "$r$2"; h=$2; shift 2\n'
        'exec chroot "$r" sh -c \'cd "$0"; exec "$@"\' "$h" "$@"'
    )
    return ["unshare", "--mount", "bash", "-c", script, "bash", str(root), str(REPOSITORY)]


def _make_image(release: str, tree: Path, kernel: Kernel, image: Path) -> None:
    with tempfile.TemporaryDirectory(dir=image.parent, prefix=".image-") as scratch:
        root = Path(scratch) / "root"
        shutil.rmtree(tree / "var/cache/apt", ignore_errors=True)
        shutil.rmtree(tree / "var/lib/apt/lists", ignore_errors=True)
        _run("cp", "-a", "--reflink=auto", tree, root)
        units = root / "etc/systemd/system"
        for name in _NO_SERVICES:
            (units / name).unlink(missing_ok=True)
            (units / name).symlink_to("/dev/null")
        (units / "cases.service").write_text(_UNIT)
        wants = units / "multi-user.target.wants"
        shutil.rmtree(wants)
        wants.mkdir()
        (wants / "cases.service").symlink_to("../cases.service")
        (root / "etc/fstab").write_text(_FSTAB)
        (root / "etc/hostname").write_text("node-1\n")
        (root / "etc/hosts").write_text(_HOSTS)
        (root / "etc/machine-id").write_text("0123456789abcdef0123456789abcdef\n")
        (root / "etc/modules-load.d/bed.conf").write_text("9p\n9pnet_virtio\noverlay\n")
        for directory in (CHECKOUT, VENV / "bin"):
            (root / directory.relative_to("/")).mkdir(parents=True)
        modules = next(kernel.root.glob(f"**/lib/modules/{kernel.version}"))
        (root / "usr/lib/modules").mkdir(exist_ok=True)
        _run("cp", "-a", modules, root / "usr/lib/modules/")
        _install(release, root)
        part = image.with_suffix(".part")
        part.unlink(missing_ok=True)
        with part.open("wb") as file:
            file.truncate(_IMAGE_BYTES)
        _run("mke2fs", "-q", "-t", "ext4", "-O", "^has_journal", "-d", root, part)
        part.rename(image)


def _install(release: str, root: Path) -> None:
    """A virtual environment with what is pinned, for the release's Python, and the command."""
    version, venv = _PYTHON[release], root / VENV.relative_to("/")
    (venv / "bin/python").symlink_to(f"/usr/bin/python{version}")
    (venv / "pyvenv.cfg").write_text(
        f"home = /usr/bin\ninclude-system-site-packages = false\nversion = {version}\n"
    )
    packages = venv / f"lib/python{version}/site-packages"
    pinned = (REPOSITORY / "requirements/runtime.txt").read_text()
    wheels = root.parent / "wheels.txt"
    # cgroupspy has no wheel; it is Python and nothing else, so that ours serves.
    name, kept = "", []
    for line in pinned.splitlines(keepends=True):
        name = line.partition("==")[0] if "==" in line and line[0].isalpha() else name
        if name != "cgroupspy":
            kept.append(line)
    wheels.write_text("".join(kept))
    _run(
        *(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--require-hashes"),
        *(platforms("arm64") if release.startswith("arm64-") else ()),
        *("--only-binary=:all:", "--python-version", version, "--target", packages, "-r", wheels),
    )
    import cgroupspy

    shutil.copytree(Path(cgroupspy.__file__).parent, packages / "cgroupspy")
    if not release.startswith("arm64-"):  # nothing of it runs here
        _run("chroot", root, *_COMPILE, f"/{packages.relative_to(root)}")
    program = root / "usr/local/bin/nri-numa"
    program.write_text(_PROGRAM)
    program.chmod(0o755)


def _make_initrd(kernel: Kernel, busybox: Path, packs: Path, initrd: Path) -> None:
    """The first file system: busybox, and the modules up to the disk with the root."""
    modules = next(kernel.root.glob(f"**/lib/modules/{kernel.version}"))
    needs: dict[str, list[str]] = {}
    for line in (modules / "modules.dep").read_text().splitlines():
        path, _, others = line.partition(":")
        needs[path] = others.split()
    order: list[str] = []
    for name in _FIRST:
        for path in needs:
            if path.rpartition("/")[2].partition(".")[0] == name:
                order += [each for each in (*reversed(needs[path]), path) if each not in order]
    with tempfile.TemporaryDirectory(dir=initrd.parent, prefix=".initrd-") as scratch:
        root = Path(scratch)
        for directory in ("bin", "proc", "dev", "root", "modules"):
            (root / directory).mkdir()
        shutil.copy(busybox, root / "bin/busybox")
        for path in order:
            data = (modules / path).read_bytes()
            name = path.rpartition("/")[2].removesuffix(".xz")
            (root / "modules" / name).write_bytes(
                lzma.decompress(data) if path.endswith(".xz") else data
            )
        names = [path.rpartition("/")[2].removesuffix(".xz") for path in order]
        (root / "modules/order").write_text(" ".join(names))
        (root / "init").write_text(_INIT)
        (root / "init").chmod(0o755)
        with initrd.open("wb") as out:
            files = "\n".join(str(p.relative_to(root)) for p in sorted(root.rglob("*")))
            subprocess.run(
                [str(packs), "cpio", "-o", "-H", "newc"],
                input=files.encode(), stdout=out, stderr=subprocess.DEVNULL, cwd=root, check=True,
            )  # fmt: skip


def start_script(variables: Mapping[str, str], arguments: Sequence[str], module: str) -> str:
    """What ``cases.service`` runs; see `tests.beds.vm_bed.start_script`."""
    kept = {**variables, "NRI_NUMA_CACHE": str(CACHE), "LC_ALL": "C"}
    exports = "".join(f"export {key}={shlex.quote(value)}\n" for key, value in kept.items())
    python = [f"{VENV}/bin/python", "-m", module, *arguments]
    return f"cat /proc/uptime\n{exports}cd {CHECKOUT}\nexec {shlex.join(python)}\n"


def command(
    machine: Machine,
    found: System,
    *,
    qemu: str,
    shared: Path,
    control: Path | None = None,
    more: Sequence[str] = (),
) -> list[str]:
    """The command line of QEMU that boots a machine; its console is the standard output."""
    console, board = "console=ttyS0 pci=nomsi", "q35"
    if machine.arm64:
        # On a busy host systemd itself takes longer to start than units may by default.
        console = "console=ttyAMA0 systemd.getty_auto=0 systemd.default_timeout_start_sec=600"
        board = "virt,gic-version=3"
        qemu = qemu.replace("x86_64", "aarch64")
    parameters = (
        f"root=/dev/vda rw {console} mitigations=off loglevel=5 panic=-1 "
        "systemd.show_status=0 systemd.unit=multi-user.target"
    )
    exports = [
        ("checkout", REPOSITORY, ",readonly=on"),
        ("cache", Path(os.path.realpath(cache_dir())), ",readonly=on"),
        ("out", shared, ""),
    ]
    return [
        qemu,
        *("-machine", board, "-nodefaults", "-no-reboot", "-display", "none"),
        *("-serial", "stdio", "-m", f"{machine.memory_mib}M", "-name", machine.name),
        "-smp",
        f"{len(machine.present)},maxcpus={machine.cpu_count},sockets={machine.sockets},"
        f"cores={machine.cores},threads={machine.threads}",
        *qemu_options(machine),
        *("-kernel", str(found.kernel.image), "-initrd", str(found.initrd)),
        *("-append", parameters),
        # What the guest writes is in a file without a name, which goes with QEMU.
        *("-drive", f"file={found.image},format=raw,if=none,id=root,snapshot=on"),
        *("-device", "virtio-blk-pci,drive=root"),
        *("-global", "virtio-9p-pci.ioeventfd=off"),
        *(
            word
            for tag, path, rights in exports
            for word in (
                "-fsdev",
                f"local,id={tag},path={path},security_model=none,multidevs=remap{rights}",
                "-device",
                f"virtio-9p-pci,fsdev={tag},mount_tag={tag},bus=pcie.0",
            )
        ),
        *(("-qmp", f"unix:{control},server=on,wait=off") if control is not None else ()),
        *more,
    ]
