"""Builds the container image without a daemon, a base image or root: ``-o image.tar``.

The image holds the interpreter that runs this program, the part of its standard library that a
service needs, the shared libraries both are linked with, the installed dependencies, and nri_numa
from this tree. No shell, no package manager. One layer, in an archive in the OCI image layout that
also carries the older ``manifest.json``, so that ``ctr images import``, ``podman load`` and
``docker load`` all take it. The same inputs give the same bytes.

``--rootfs rootfs.tar`` writes the plain layer instead, for the Containerfile at the top.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import importlib.metadata
import io
import json
import marshal
import os
import platform
import re
import shutil
import stat
import subprocess
import sys
import sysconfig
import tarfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.util import MAGIC_NUMBER, source_hash
from pathlib import Path
from typing import Any, Final

REPOSITORY: Final = Path(__file__).resolve().parents[1]
RUNTIME_LOCK: Final = REPOSITORY / "requirements" / "runtime.txt"
SITE: Final = "opt/nri-numa"
PROGRAM: Final = "usr/local/bin/nri-numa"
EPOCH: Final = 0

# Parts of the standard library that no service uses, by the first part of their path.
_LEFT_OUT: Final = re.compile(
    r"(test|tests|idlelib|tkinter|turtledemo|turtle\.py|ensurepip|lib2to3|pydoc_data|distutils"
    r"|sqlite3|curses|dbm|venv|config-[^/]*|site-packages|dist-packages|__phello__.*"
    r"|EXTERNALLY-MANAGED|sitecustomize\.py|_sysconfigdata.*)(/|$)"
)
_LEFT_OUT_EXTENSIONS: Final = re.compile(
    r"lib-dynload/(_tkinter|_sqlite3|_curses|_curses_panel|_dbm|_gdbm|readline|_test[a-z]*|_xx[a-z]*"
    r"|xx[a-z]*|nis|ossaudiodev|spwd|_crypt|audioop)\."
)
_ARCHITECTURES: Final = {"x86_64": "amd64", "aarch64": "arm64"}


class Rootfs:
    """The files of the image by path; nothing is written to disk."""

    def __init__(self) -> None:
        self._files: dict[str, tuple[bytes, int]] = {}
        self._links: dict[str, str] = {}
        self._directories: set[str] = set()

    def add(self, path: str, data: bytes, mode: int = 0o644) -> None:
        """Add a file."""
        self._files[path.lstrip("/")] = (data, mode)

    def link(self, path: str, target: str) -> None:
        """Add a symbolic link."""
        self._links[path.lstrip("/")] = target

    def directory(self, path: str) -> None:
        """Add a directory, for mounts."""
        self._directories.add(path.strip("/"))

    def copy(self, source: Path, path: str) -> None:
        """Add a file of this machine; a program stays executable."""
        executable = source.stat().st_mode & stat.S_IXUSR
        self.add(path, source.read_bytes(), 0o755 if executable else 0o644)

    def python(self, source: Path, path: str) -> None:
        """Add a module together with its compiled form, since the image is read-only."""
        data = source.read_bytes()
        self.add(path, data)
        try:
            code = compile(data, f"/{path}", "exec", dont_inherit=True)
        except (SyntaxError, ValueError):
            return  # a template or an example, not to be imported
        folder, _, name = path.rpartition("/")
        tag = sys.implementation.cache_tag
        # Flag 1 without the check: the source never changes (PEP 552).
        head = MAGIC_NUMBER + (1).to_bytes(4, "little") + source_hash(data)
        self.add(f"{folder}/__pycache__/{name.removesuffix('.py')}.{tag}.pyc", head + dumps(code))

    def tar(self) -> bytes:
        """One layer, sorted, owned by root, without times."""
        directories = set(self._directories)
        for path in [*self._files, *self._links, *self._directories]:
            while "/" in path:
                path = path.rpartition("/")[0]
                directories.add(path)
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as archive:
            for path in sorted({*directories, *self._files, *self._links}):
                member = tarfile.TarInfo(path)
                member.mtime = EPOCH
                if path in self._files:
                    data, member.mode = self._files[path]
                    member.size = len(data)
                    archive.addfile(member, io.BytesIO(data))
                elif path in self._links:
                    member.type, member.linkname, member.mode = (
                        tarfile.SYMTYPE,
                        self._links[path],
                        0o777,
                    )
                    archive.addfile(member)
                else:
                    member.type = tarfile.DIRTYPE
                    member.mode = 0o1777 if path == "tmp" else 0o755
                    archive.addfile(member)
        return buffer.getvalue()


def dumps(code: Any) -> bytes:
    """Marshal without references: which objects are shared differs from run to run."""
    return marshal.dumps(code, 2)


# --- what goes in -----------------------------------------------------------------------------


def pins() -> dict[str, str]:
    """Versions by name that a node gets on this platform."""
    from packaging.requirements import Requirement

    found = {}
    for line in RUNTIME_LOCK.read_text(encoding="utf-8").replace("\\\n", " ").splitlines():
        requirement = Requirement(line.partition(" --hash=")[0])
        if requirement.marker is None or requirement.marker.evaluate():
            (specifier,) = requirement.specifier
            found[requirement.name] = specifier.version
    return found


def requirements(root: str = "nri-numa") -> list[importlib.metadata.Distribution]:
    """The installed distributions that ``root`` needs, it left out, sorted by name.

    Raises:
        SystemExit: one is not installed, or not in the version that is pinned.
    """
    from packaging.requirements import Requirement

    found: dict[str, importlib.metadata.Distribution] = {}
    pinned = pins()
    seen: set[tuple[str, frozenset[str]]] = set()
    waiting = [(Requirement(r), frozenset({""})) for r in importlib.metadata.requires(root) or ()]
    while waiting:
        requirement, extras = waiting.pop()
        marker = requirement.marker
        if marker is not None and not any(marker.evaluate({"extra": one}) for one in extras):
            continue
        name = re.sub(r"[-_.]+", "-", requirement.name).lower()
        asked = frozenset({"", *requirement.extras})
        if (name, asked) in seen:
            continue
        seen.add((name, asked))
        try:
            found[name] = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            raise SystemExit(f"{name} is not installed: run make node first") from None
        if (version := found[name].version) != pinned.get(name):
            raise SystemExit(
                f"{name} {version} is installed, {RUNTIME_LOCK.relative_to(REPOSITORY)} has"
                f" {pinned.get(name, 'none')}: run make node first"
            )
        waiting += [(Requirement(r), asked) for r in found[name].requires or ()]
    return [found[name] for name in sorted(found)]


def _add_distribution(rootfs: Rootfs, distribution: importlib.metadata.Distribution) -> list[Path]:
    """Add its files; returns its shared objects."""
    objects = []
    for file in distribution.files or ():
        name = str(file)
        if name.startswith("..") or "__pycache__" in name or name.endswith((".pyc", ".pyi")):
            continue
        if re.search(
            r"(^|/)tests?/|\.dist-info/(RECORD|INSTALLER|REQUESTED|direct_url\.json)", name
        ):
            continue
        source = Path(str(distribution.locate_file(file)))
        if not source.is_file():
            continue
        if name.endswith(".py"):
            rootfs.python(source, f"{SITE}/{name}")
        else:
            rootfs.copy(source, f"{SITE}/{name}")
        if re.search(r"\.so(\.|$)", name):
            objects.append(source)
    return objects


def _add_standard_library(rootfs: Rootfs) -> list[Path]:
    library = Path(sysconfig.get_path("stdlib"))
    objects = []
    for source in _walk(library):
        name = source.relative_to(library).as_posix()
        if _LEFT_OUT.match(name) or _LEFT_OUT_EXTENSIONS.match(name):
            continue
        if not source.is_file():
            continue  # a link into documentation that is not installed
        if source.suffix == ".py":
            rootfs.python(source, f"{library}/{name}".lstrip("/"))
        else:
            rootfs.copy(source, f"{library}/{name}")
            if source.suffix == ".so":
                objects.append(source)
    return objects


def _walk(top: Path) -> Iterator[Path]:
    for folder, folders, files in os.walk(top):
        folders[:] = sorted(name for name in folders if name != "__pycache__")
        for name in sorted(files):
            if not name.endswith((".pyc", ".a")):
                yield Path(folder, name)


def _libraries(objects: Iterable[Path]) -> set[Path]:
    """What the dynamic linker would load for these, the linker itself included."""
    found: set[Path] = set()
    for path in sorted(set(objects)):
        done = _run("ldd", str(path))
        if missing := re.findall(r"^\s*(\S+) => not found", done.stdout, re.MULTILINE):
            raise SystemExit(f"{path} needs {', '.join(missing)}, which is not on this machine")
        found.update(Path(p) for p in re.findall(r"(/\S+) \(0x", done.stdout))
    return found


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(  # noqa: S603 - programs of the machine, on its own files
        command,
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": os.environ.get("PATH", ""), "LC_ALL": "C"},
    )


def _licences(libraries: Iterable[Path]) -> dict[str, Path]:
    """Copyright file by Debian package, for what is copied from the machine."""
    if shutil.which("dpkg-query") is None:
        return {}
    files = sorted({str(path) for each in libraries for path in (each, each.resolve())})
    # Debian 12 knows the same file as /lib/… and /usr/lib/….
    files += [f.removeprefix("/usr") for f in files if f.startswith("/usr/lib")]
    done = _run("dpkg-query", "-S", *files)
    packages = {line.split(":", 1)[0] for line in done.stdout.splitlines()}
    found = {}
    for package in sorted(packages):
        file = Path("/usr/share/doc", package, "copyright")
        if file.is_file():
            found[package] = file.resolve()
    return found


def assemble() -> Rootfs:
    """Everything that the image holds."""
    rootfs = Rootfs()
    interpreter = Path(sys.executable).resolve()
    rootfs.copy(interpreter, str(interpreter))
    objects = [interpreter, *_add_standard_library(rootfs)]
    for distribution in requirements():
        objects += _add_distribution(rootfs, distribution)
    for source in _walk(REPOSITORY / "nri_numa"):
        name = source.relative_to(REPOSITORY).as_posix()
        if source.suffix == ".py":
            rootfs.python(source, f"{SITE}/{name}")
        elif source.suffix != ".pyi":
            rootfs.copy(source, f"{SITE}/{name}")
    libraries = _libraries(objects)
    for library in sorted(libraries):
        # Under the name that is asked for; what the links between point to does not matter.
        rootfs.copy(library.resolve(), str(library))
    for package, file in _licences([interpreter, *libraries]).items():
        rootfs.copy(file, f"usr/share/doc/{package}/copyright")
    rootfs.copy(REPOSITORY / "LICENSE", "usr/share/doc/nri-numa/LICENSE")
    rootfs.add(
        PROGRAM,
        f"#!{interpreter} -P\nimport sys\n\nsys.path.insert(0, '/{SITE}')\n"
        "from nri_numa.cli import main\n\nmain()\n".encode(),
        0o755,
    )
    rootfs.add("etc/passwd", b"root:x:0:0:root:/:/usr/sbin/nologin\n")
    rootfs.add("etc/group", b"root:x:0:\n")
    for path in ("proc", "sys", "dev", "tmp", "run/nri-numa", "var", "etc/nri-numa"):
        rootfs.directory(path)
    rootfs.link("var/run", "/run")
    return rootfs


# --- the archive ------------------------------------------------------------------------------


def version() -> str:
    """Of nri_numa in this tree."""
    text = (REPOSITORY / "nri_numa" / "__init__.py").read_text(encoding="utf-8")
    match = re.search(r'__version__ = "([^"]+)"', text)
    if match is None:
        raise SystemExit("nri_numa/__init__.py names no version")
    return match[1]


def _json(document: Mapping[str, Any] | Sequence[Any]) -> bytes:
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode()


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def archive(layer: bytes, reference: str) -> bytes:
    """The image as one archive.

    Args:
        layer: a tar file.
        reference: name with tag.
    """
    packed = gzip.compress(layer, 6, mtime=EPOCH)
    machine = platform.machine()
    architecture = _ARCHITECTURES.get(machine, machine)
    config = _json(
        {
            "architecture": architecture,
            "os": "linux",
            "created": "1970-01-01T00:00:00Z",
            "config": {
                "User": "0:0",
                "Env": [
                    "PATH=/usr/local/bin:/usr/bin:/bin",
                    "LANG=C.UTF-8",
                    f"PYTHONPATH=/{SITE}",  # for the demo, which starts a second interpreter
                ],
                "Entrypoint": [f"/{PROGRAM}"],
                "Cmd": ["run"],
                "WorkingDir": "/",
                "Labels": {
                    "org.opencontainers.image.title": "nri-numa",
                    "org.opencontainers.image.version": version(),
                    "org.opencontainers.image.licenses": "Apache-2.0",
                },
            },
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{_digest(layer)}"]},
        }
    )
    media = "application/vnd.oci.image"
    manifest = _json(
        {
            "schemaVersion": 2,
            "mediaType": f"{media}.manifest.v1+json",
            "config": _descriptor(f"{media}.config.v1+json", config),
            "layers": [_descriptor(f"{media}.layer.v1.tar+gzip", packed)],
        }
    )
    entry = _descriptor(f"{media}.manifest.v1+json", manifest)
    entry["platform"] = {"architecture": architecture, "os": "linux"}
    entry["annotations"] = {
        "io.containerd.image.name": reference,
        "org.opencontainers.image.ref.name": reference.rpartition(":")[2],
    }
    index = {
        "schemaVersion": 2,
        "mediaType": f"{media}.index.v1+json",
        "manifests": [entry],
    }
    docker = [
        {
            "Config": f"blobs/sha256/{_digest(config)}",
            "RepoTags": [reference],
            "Layers": [f"blobs/sha256/{_digest(packed)}"],
        }
    ]
    rootfs = Rootfs()
    for blob in (config, manifest, packed):
        rootfs.add(f"blobs/sha256/{_digest(blob)}", blob)
    rootfs.add("oci-layout", _json({"imageLayoutVersion": "1.0.0"}))
    rootfs.add("index.json", _json(index))
    rootfs.add("manifest.json", _json(docker))
    return rootfs.tar()


def _descriptor(media_type: str, data: bytes) -> dict[str, Any]:
    return {"mediaType": media_type, "digest": f"sha256:{_digest(data)}", "size": len(data)}


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="build_image", description=__doc__.split("\n")[0])
    parser.add_argument("-o", "--output", metavar="FILE", help="archive to write")
    parser.add_argument("--rootfs", metavar="FILE", help="write the plain layer")
    parser.add_argument(
        "--name",
        metavar="REFERENCE",
        default=f"localhost/nri-numa:{version()}",
        help="default: %(default)s",
    )
    options = parser.parse_args(arguments)
    if not options.output and not options.rootfs:
        parser.error("say what to write: -o FILE or --rootfs FILE")
    layer = assemble().tar()
    if options.rootfs:
        Path(options.rootfs).parent.mkdir(parents=True, exist_ok=True)
        Path(options.rootfs).write_bytes(layer)
        print(f"{options.rootfs}: {len(layer) / 1e6:.1f} MB")
    if options.output:
        image = archive(layer, options.name)
        Path(options.output).parent.mkdir(parents=True, exist_ok=True)
        Path(options.output).write_bytes(image)
        print(f"{options.output}: {options.name}, {len(image) / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
