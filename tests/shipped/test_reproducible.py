"""What is handed out can be made again, byte for byte, and its sums tell a changed file."""

import gzip
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import threading
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.beds.install_manifests import program
from tools import release
from tools.build_image import SITE, unpack
from tools.interpreter import PYTHON, here

# Everything is built twice; on a busy machine that takes more than ten minutes.
pytestmark = [pytest.mark.release, pytest.mark.timeout(1800)]
ROOT = Path(__file__).resolve().parents[2]
PARTS = (
    *("nri_numa", "tools", "config", "requirements", "systemd", "tests/beds"),
    *("pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE"),
)
"""Of the beds, where packages of Debian are found and kept."""


def made(tree: Path, *, umask: int, time_s: int, **environment: str) -> Path:
    """Everything, made from a copy of this tree with other times and modes."""
    ignored = shutil.ignore_patterns("__pycache__")
    previous = os.umask(umask)
    try:
        tree.mkdir(parents=True)
        for name in PARTS:
            source, copy = ROOT / name, tree / name
            copy.parent.mkdir(exist_ok=True)
            if source.is_dir():
                shutil.copytree(source, copy, ignore=ignored, copy_function=shutil.copyfile)
            else:
                shutil.copyfile(source, copy)
        for path in (*tree.rglob("*"), tree):
            os.utime(path, (time_s, time_s))
        subprocess.run(
            [sys.executable, "-m", "tools.release", "-o", "out", f"--architecture={here()}"],
            cwd=tree,
            check=True,
            env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1", **environment},
        )
    finally:
        os.umask(previous)
    return tree / "out"


@pytest.fixture(scope="module")
def twice(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    one = made(
        tmp_path_factory.mktemp("one") / "tree",
        umask=0o022,
        time_s=1_000_000_000,
        TZ="UTC",
        PYTHONHASHSEED="1",
        SOURCE_DATE_EPOCH="1000000000",
    )
    two = made(
        tmp_path_factory.mktemp("two") / "elsewhere" / "deeper" / "tree",
        umask=0o077,
        time_s=1_700_000_001,
        TZ="Asia/Kolkata",
        PYTHONHASHSEED="2",
        LC_ALL="C",
        SOURCE_DATE_EPOCH="1700000001",
    )
    return one, two


@pytest.mark.slow
def test_another_time_place_and_user_make_the_same_bytes(twice: tuple[Path, Path]) -> None:
    one, two = twice
    names = sorted(path.name for path in one.iterdir())
    assert len(names) == 14
    assert names == sorted(path.name for path in two.iterdir())
    differing = [name for name in names if (one / name).read_bytes() != (two / name).read_bytes()]
    assert differing == []


@pytest.mark.slow
def test_the_licence_is_in_all_of_them(twice: tuple[Path, Path]) -> None:
    licence = (ROOT / "LICENSE").read_bytes()
    (wheel,) = twice[0].glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (each for each in archive.namelist() if each.endswith("licenses/LICENSE"))
        assert archive.read(name) == licence
        assert not [each for each in archive.namelist() if each.startswith(("tests", "tools"))]
    (image,) = twice[0].glob("*-image.tar")
    with tarfile.open(image) as archive:
        largest = max(archive.getmembers(), key=lambda member: member.size)
        layer = archive.extractfile(largest)
        with tarfile.open(fileobj=layer, mode="r:gz") as files:
            names = files.getnames()
    assert "usr/share/doc/nri-numa/LICENSE" in names
    # anyio brings a module for pytest; pytest itself does not come.
    tools = re.compile(r"(^|/)_?(pytest|setuptools)(-[^/]*)?(/|$)")
    assert not [each for each in names if tools.search(each)]


@pytest.mark.slow
def test_the_sums_are_those_of_sha256sum(twice: tuple[Path, Path]) -> None:
    one, _ = twice
    check = ["sha256sum", "--check", "--strict", release.SUMS]
    done = subprocess.run(check, cwd=one, capture_output=True, text=True, check=True)
    assert done.stdout.count(": OK\n") == 13


def test_a_used_directory_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "letter").write_text("dear")
    with pytest.raises(SystemExit):
        release.main(["-o", str(tmp_path)])
    assert "holds other files" in capsys.readouterr().err
    assert (tmp_path / "letter").read_text() == "dear"


@pytest.mark.slow
def test_the_bundle_runs_and_packages_hold_it(twice: tuple[Path, Path], tmp_path: Path) -> None:
    """By its own interpreter and C library, which programs that it starts use too."""
    one, _ = twice
    (packed,) = one.glob("*-linux-*.tar.gz")
    unpack(packed, tmp_path)
    (program,) = tmp_path.glob("*/bin/nri-numa")
    arguments = ("simulate", ROOT / "config/examples/03-database.yaml", "--machine", "synthetic:")
    said = subprocess.run([program, *arguments], env={}, capture_output=True, text=True, check=True)
    assert "database" in said.stdout
    again = (
        "import subprocess, sys; subprocess.run([sys.executable, '-m', 'nri_numa', '--version'])"
    )
    command = [program.with_name("python3"), "-c", again]
    said = subprocess.run(command, env={}, capture_output=True, text=True, check=True)
    assert said.stdout == f"nri-numa {release.version()}\n"
    (deb,) = one.glob("*.deb")
    listed = subprocess.run(["dpkg-deb", "-c", deb], capture_output=True, text=True, check=True)
    (rpm,) = one.glob("*.rpm")
    asked = subprocess.run(["rpm", "-qpl", rpm], capture_output=True, text=True, check=True)
    units = ("/usr/lib/systemd/system/nri-numa.service", "/usr/lib/systemd/system/nri-numa.socket")
    for name in ("/etc/nri-numa/agent.yaml", *units):
        assert name[1:] in listed.stdout
        assert name in asked.stdout


_IMPORT_ALL = """
import ast, importlib, pathlib, pkgutil, sys, nri_numa
wanted = {module.name for module in pkgutil.walk_packages(nri_numa.__path__, "nri_numa.")}
wanted -= {"nri_numa.__main__"}
for path in pathlib.Path(nri_numa.__file__).parent.rglob("*.py"):
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING":
            node.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            wanted |= {each.name for each in node.names}
        elif isinstance(node, ast.ImportFrom):
            wanted.add(node.module)
problems = []
for name in sorted(wanted):
    try:
        importlib.import_module(name)
    except Exception as error:
        problems.append(f"{name}: {error!r}")
print(len(wanted), *problems, sep="\\n")
"""


def interpreter_in(artefact: Path, into: Path) -> list[str | Path]:
    """The words that start the interpreter of what is handed out."""
    if artefact.name.endswith("-image.tar"):
        unpack(artefact, into / "layout")
        blobs = sorted(
            (into / "layout/blobs/sha256").iterdir(), key=lambda each: each.stat().st_size
        )
        unpack(gzip.decompress(blobs[-1].read_bytes()), into)
        return ["/usr/sbin/chroot", into, f"/usr/bin/python{PYTHON}"]
    if artefact.suffix == ".deb":
        subprocess.run(["dpkg-deb", "-x", artefact, into], check=True)
    elif artefact.suffix == ".rpm":
        cpio = subprocess.run(["rpm2cpio", artefact], stdout=subprocess.PIPE, check=True).stdout
        subprocess.run(["cpio", "-id", "--quiet"], cwd=into, input=cpio, check=True)
    else:
        unpack(artefact, into)
    (program,) = (each for each in into.rglob("bin/python3") if each.parent.parent.name != "usr")
    return [program]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["*-image.tar", "*-linux-*.tar.gz", "*.deb", "*.rpm"])
def test_all_imports_are_in_it(twice: tuple[Path, Path], kind: str, tmp_path: Path) -> None:
    """By its own interpreter: modules, and what they import only when a configuration asks."""
    (artefact,) = twice[0].glob(kind)
    command = [*interpreter_in(artefact, tmp_path), "-c", _IMPORT_ALL]
    given = {"PYTHONPATH": f"/{SITE}"}  # as in the image's configuration
    said = subprocess.run(command, env=given, stdout=subprocess.PIPE, text=True, check=True)
    count, *problems = said.stdout.splitlines()
    assert int(count) > 200
    # `nri-numa measure` is for the checkout, and says so.
    assert [each for each in problems if "No module named 'numpy'" not in each] == []


class _Registry(BaseHTTPRequestHandler):
    """A registry of one OCI layout, as far as a pull needs it."""

    layout: Path

    def do_GET(self) -> None:
        kind, _, name = self.path.rpartition("/")
        (entry,) = json.loads((self.layout / "index.json").read_text())["manifests"]
        if name == entry["annotations"]["org.opencontainers.image.ref.name"]:
            name = entry["digest"]
        file = self.layout / "blobs/sha256" / name.removeprefix("sha256:")
        data = file.read_bytes() if file.is_file() else b""
        self.send_response(200 if data or self.path == "/v2/" else 404)
        media = entry["mediaType"] if kind.endswith("/manifests") else "application/octet-stream"
        self.send_header("Content-Type", media)
        self.send_header("Docker-Content-Digest", name)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)

    do_HEAD = do_GET

    def log_message(self, *words: object) -> None:
        """Nothing."""


def test_helm_pulls_the_chart_of_the_oci_archive(tmp_path: Path) -> None:
    packed, archive = release.chart(tmp_path)
    unpack(archive, tmp_path / "layout")
    (tmp_path / "pulled").mkdir()
    handler = type("Handler", (_Registry,), {"layout": tmp_path / "layout"})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        where = f"oci://127.0.0.1:{server.server_port}/nri-numa"
        command = [program("helm"), "pull", where, "--plain-http", f"--version={release.version()}"]
        said = subprocess.run(
            [*command, f"--destination={tmp_path / 'pulled'}"],
            env={"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        server.shutdown()
    assert said.returncode == 0, said.stderr
    assert (tmp_path / "pulled" / packed.name).read_bytes() == packed.read_bytes()
