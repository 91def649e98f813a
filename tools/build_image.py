"""Builds the container image without a daemon, a base image or root: ``-o image.tar``.

The image holds an interpreter with the part of its standard library that a service needs
(`tools.interpreter`), the dependencies that requirements/runtime.txt pins, and nri_numa from this
tree. No shell, no package manager. One layer, in an archive in the OCI image layout that also
carries the older ``manifest.json``, so that ``ctr images import``, ``podman load`` and
``docker load`` all take it. The same inputs give the same bytes. ``--architecture`` says for which
machines; with both there is one index, which ``ctr`` and ``podman`` take.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import importlib.metadata
import io
import json
import os
import posixpath
import re
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from tools import interpreter
from tools.interpreter import REPOSITORY

RUNTIME_LOCK: Final = REPOSITORY / "requirements" / "runtime.txt"
OURS: Final = "nri-numa[otel]"
"""What is installed: with the extra that a configuration can ask for."""
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
_FROM_DEBIAN: Final = re.compile(
    r"usr/(bin/python3\.|lib/python3\.|lib/[^/]*-linux-gnu/[^/]*\.so|share/doc/[^/]*(/copyright)?$"
    r"|lib(64)?/ld-linux)"
)
"""What is taken of the interpreter's packages."""
_C_PARTS: Final = re.compile(
    r"/(lib(BrokenLocale|memusage|pcprofile|nss_(hesiod|compat)|thread_db|mvec)|audit)"
)
"""Of the C library, what nothing here is linked with."""


class Rootfs:
    """The files of the image by path; nothing is written to disk.

    Attributes:
        origin: package (purl) of what is added now.
        origins: by path, where a file is from.
    """

    def __init__(self) -> None:
        self.origin = ""
        self.origins: dict[str, str] = {}
        self._files: dict[str, tuple[bytes, int]] = {}
        self._links: dict[str, str] = {}
        self._directories: set[str] = set()

    def add(self, path: str, data: bytes, mode: int = 0o644) -> None:
        """Add a file."""
        self._files[path.lstrip("/")] = (data, mode)
        self.origins[path.lstrip("/")] = self.origin

    def link(self, path: str, target: str) -> None:
        """Add a symbolic link."""
        self._links[path.lstrip("/")] = target

    def directory(self, path: str) -> None:
        """Add a directory, for mounts."""
        self._directories.add(path.strip("/"))

    def files(self) -> dict[str, bytes]:
        """Contents by path."""
        return {path: data for path, (data, _) in self._files.items()}

    def under(self, folder: str) -> Rootfs:
        """The same files in a folder."""

        def there(paths: Mapping[str, Any]) -> dict[str, Any]:
            return {f"{folder}/{path}".lstrip("/"): each for path, each in paths.items()}

        moved = Rootfs()
        moved.origin, moved.origins = self.origin, there(self.origins)
        moved._files, moved._links = there(self._files), there(self._links)
        return moved

    def with_compiled(self, files: Mapping[str, bytes]) -> None:
        """Add the compiled form of each module, since the image is read-only."""
        modules = {path: data for path, (data, _) in self._files.items() if path.endswith(".py")}
        for path, data in interpreter.compiled(files, modules).items():
            folder, _, name = path.rpartition("/")
            tag = f"cpython-{interpreter.PYTHON.replace('.', '')}"
            self.origin = self.origins[path]
            self.add(f"{folder}/__pycache__/{name.removesuffix('.py')}.{tag}.pyc", data)

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
                    member.type, member.linkname = tarfile.SYMTYPE, self._links[path]
                    member.mode = 0o777
                    archive.addfile(member)
                else:
                    member.type = tarfile.DIRTYPE
                    member.mode = 0o1777 if path == "tmp" else 0o755
                    archive.addfile(member)
        return buffer.getvalue()


# --- what goes in -----------------------------------------------------------------------------


def unpack(tar: Path | bytes, into: str | Path) -> None:
    """Unpack what was made here, with its links and modes; Python 3.11.2 knows no filters yet."""
    data = tar if isinstance(tar, bytes) else tar.read_bytes()
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        archive.extraction_filter = getattr(tarfile, "fully_trusted_filter", None)
        archive.extractall(into)  # noqa: S202


def pins() -> dict[str, str]:
    """Versions by name that a node gets."""
    from packaging.requirements import Requirement

    found = {}
    for line in RUNTIME_LOCK.read_text(encoding="utf-8").replace("\\\n", " ").splitlines():
        requirement = Requirement(line.partition(" --hash=")[0])
        if requirement.marker is None or requirement.marker.evaluate():
            (specifier,) = requirement.specifier
            found[requirement.name] = specifier.version
    return found


def requirements(root: str = OURS) -> list[importlib.metadata.Distribution]:
    """The installed distributions that ``root`` needs, it left out, sorted by name.

    Raises:
        SystemExit: one is not installed, or not in the version that is pinned.
    """
    from packaging.requirements import Requirement

    found: dict[str, importlib.metadata.Distribution] = {}
    pinned = pins()
    seen: set[tuple[str, frozenset[str]]] = set()
    asked = Requirement(root)
    needed = importlib.metadata.requires(asked.name) or ()
    waiting = [(Requirement(each), frozenset({"", *asked.extras})) for each in needed]
    while waiting:
        requirement, extras = waiting.pop()
        marker = requirement.marker
        if marker is not None and not any(marker.evaluate({"extra": one}) for one in extras):
            continue
        name = re.sub(r"[-_.]+", "-", requirement.name).lower()
        wanted = frozenset({"", *requirement.extras})
        if (name, wanted) in seen:
            continue
        seen.add((name, wanted))
        try:
            found[name] = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            raise SystemExit(f"{name} is not installed: run make setup first") from None
        if (version := found[name].version) != pinned.get(name):
            raise SystemExit(
                f"{name} {version} is installed, {RUNTIME_LOCK.relative_to(REPOSITORY)} has"
                f" {pinned.get(name, 'none')}: run make setup first"
            )
        waiting += [(Requirement(each), wanted) for each in found[name].requires or ()]
    return [found[name] for name in sorted(found)]


def purl(distribution: importlib.metadata.Distribution) -> str:
    """Its name for scanners."""
    name = re.sub(r"[-_.]+", "-", distribution.name).lower()
    return f"pkg:pypi/{name}@{distribution.version}"


def _add_distributions(rootfs: Rootfs, architecture: str) -> None:
    """Add what is pinned, from wheels for that architecture."""
    with tempfile.TemporaryDirectory() as site:
        subprocess.run(  # noqa: S603 - the interpreter that runs this
            [
                *(sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"),
                *("--no-deps", "--require-hashes", "--no-compile", "--no-build-isolation"),
                # It has no wheel, and only modules.
                *("--only-binary=:all:", "--no-binary=cgroupspy"),
                *(f"--python-version={interpreter.PYTHON}", "--implementation=cp"),
                *("--target", site),
                *interpreter.platforms(architecture),
                *("--requirement", str(RUNTIME_LOCK)),
            ],
            check=True,
        )
        for distribution in importlib.metadata.distributions(path=[site]):
            rootfs.origin = purl(distribution)
            for file in distribution.files or ():
                name = str(file)
                source = Path(site, name)
                if name.startswith("..") or name.endswith(".pyi") or not source.is_file():
                    continue
                if not re.search(
                    r"(^|/)tests?/|\.dist-info/(RECORD|INSTALLER|REQUESTED|direct_url\.json)", name
                ):
                    rootfs.add(f"{SITE}/{name}", source.read_bytes())


def _add_interpreter(rootfs: Rootfs, architecture: str) -> None:
    """Add the interpreter, what it and the wheels are linked with, and their licences.

    A library stands under the name that is asked for; what the links between point to does not
    matter.
    """
    for package in interpreter.packages(architecture):
        rootfs.origin = package.purl
        found = [(one, one.name.removeprefix("./"), data) for one, data in package.members()]
        linked = {
            posixpath.normpath(posixpath.join(posixpath.dirname(path), one.linkname)): path
            for one, path, _ in found
            if one.issym() and ".so" in path and "/" not in one.linkname
        }
        for member, path, data in found:
            library = re.sub(r"^usr/lib/python3[^/]*/", "", path)
            if not _FROM_DEBIAN.match(path) or _C_PARTS.search(path):
                continue
            if path != library and (
                _LEFT_OUT.match(library) or _LEFT_OUT_EXTENSIONS.match(library)
            ):
                continue
            if member.isreg():
                rootfs.add(linked.get(path, path), data, 0o755 if member.mode & 0o100 else 0o644)
            elif member.issym() and path not in linked.values():
                rootfs.link(path, member.linkname)


def _walk(top: Path) -> Iterator[Path]:
    for folder, folders, files in os.walk(top):
        folders[:] = sorted(name for name in folders if name != "__pycache__")
        for name in sorted(files):
            if not name.endswith((".pyc", ".pyi")):
                yield Path(folder, name)


def programs(architecture: str) -> Rootfs:
    """Interpreter, dependencies and nri_numa: what image and bundle share."""
    rootfs = Rootfs()
    _add_interpreter(rootfs, architecture)
    native = rootfs
    if architecture != interpreter.here():
        _add_interpreter(native := Rootfs(), interpreter.here())
    _add_distributions(rootfs, architecture)
    rootfs.origin = f"pkg:generic/nri-numa@{version()}"
    for source in _walk(REPOSITORY / "nri_numa"):
        rootfs.add(f"{SITE}/{source.relative_to(REPOSITORY).as_posix()}", source.read_bytes())
    rootfs.add("usr/share/doc/nri-numa/LICENSE", (REPOSITORY / "LICENSE").read_bytes())
    rootfs.with_compiled(native.files())
    rootfs.origin = f"pkg:generic/nri-numa@{version()}"
    return rootfs


def assemble(made: Rootfs) -> Rootfs:
    """Everything that the image holds, of its programs."""
    rootfs = made.under("")
    rootfs.add(
        PROGRAM,
        f"#!/usr/bin/python{interpreter.PYTHON} -P\nimport sys\n\n"
        f"sys.path.insert(0, '/{SITE}')\nfrom nri_numa.cli import main\n\nmain()\n".encode(),
        0o755,
    )
    rootfs.add("etc/passwd", b"root:x:0:0:root:/:/usr/sbin/nologin\n")
    rootfs.add("etc/group", b"root:x:0:\n")
    for path in ("proc", "sys", "dev", "tmp", "run/nri-numa", "var", "etc/nri-numa"):
        rootfs.directory(path)
    rootfs.link("var/run", "/run")
    for path in ("lib", "lib64"):
        rootfs.link(path, f"usr/{path}")
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


_MEDIA: Final = "application/vnd.oci.image"


def archive(layers: Mapping[str, bytes], reference: str) -> bytes:
    """The image as one archive.

    Args:
        layers: a tar file by architecture.
        reference: name with tag.
    """
    blobs, entries, docker = [], [], []
    for architecture, layer in layers.items():
        packed = gzip.compress(layer, 6, mtime=EPOCH)
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
        manifest = oci_manifest(
            descriptor(f"{_MEDIA}.config.v1+json", config),
            descriptor(f"{_MEDIA}.layer.v1.tar+gzip", packed),
        )
        entry = descriptor(f"{_MEDIA}.manifest.v1+json", manifest)
        entries.append({**entry, "platform": {"architecture": architecture, "os": "linux"}})
        blobs += [config, packed, manifest]
        docker.append(
            {
                "Config": f"blobs/sha256/{_digest(config)}",
                "RepoTags": [reference],
                "Layers": [f"blobs/sha256/{_digest(packed)}"],
            }
        )
    if len(entries) == 1:
        (entry,) = entries
        return oci_layout(blobs, entry, reference, docker)
    index = _json(
        {"schemaVersion": 2, "mediaType": f"{_MEDIA}.index.v1+json", "manifests": entries}
    )
    return oci_layout([*blobs, index], descriptor(f"{_MEDIA}.index.v1+json", index), reference)


def oci_manifest(config: Mapping[str, Any], layer: Mapping[str, Any]) -> bytes:
    """An image's, or another artifact's, manifest."""
    media = f"{_MEDIA}.manifest.v1+json"
    return _json({"schemaVersion": 2, "mediaType": media, "config": config, "layers": [layer]})


def oci_layout(
    blobs: Sequence[bytes],
    entry: Mapping[str, Any],
    reference: str,
    docker: Sequence[Mapping[str, Any]] = (),
) -> bytes:
    """An archive in the OCI image layout, with what ``docker load`` reads where there is any."""
    names = {
        "io.containerd.image.name": reference,
        "org.opencontainers.image.ref.name": reference.rpartition(":")[2],
    }
    index = {
        "schemaVersion": 2,
        "mediaType": f"{_MEDIA}.index.v1+json",
        "manifests": [{**entry, "annotations": names}],
    }
    rootfs = Rootfs()
    for blob in blobs:
        rootfs.add(f"blobs/sha256/{_digest(blob)}", blob)
    rootfs.add("oci-layout", _json({"imageLayoutVersion": "1.0.0"}))
    rootfs.add("index.json", _json(index))
    if docker:
        rootfs.add("manifest.json", _json(docker))
    return rootfs.tar()


def descriptor(media_type: str, data: bytes) -> dict[str, Any]:
    """What refers to a blob."""
    return {"mediaType": media_type, "digest": f"sha256:{_digest(data)}", "size": len(data)}


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="build_image", description=__doc__.split("\n")[0])
    parser.add_argument("-o", "--output", metavar="FILE", required=True, help="archive to write")
    parser.add_argument(
        "--architecture",
        metavar="LIST",
        default=interpreter.here(),
        help="of amd64,arm64; default: %(default)s",
    )
    parser.add_argument(
        "--name",
        metavar="REFERENCE",
        default=f"localhost/nri-numa:{version()}",
        help="default: %(default)s",
    )
    options = parser.parse_args(arguments)
    wanted = options.architecture.split(",")
    if unknown := set(wanted) - interpreter.ARCHITECTURES.keys():
        parser.error(f"--architecture {min(unknown)}: expected of amd64,arm64")
    layers = {architecture: assemble(programs(architecture)).tar() for architecture in wanted}
    data, path = archive(layers, options.name), Path(options.output)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    print(f"{path}: {options.name} for {options.architecture}, {len(data) / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
