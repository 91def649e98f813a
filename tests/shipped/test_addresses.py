"""The project's addresses stand in pyproject.toml alone: one command writes them everywhere."""

import re
import shutil
from pathlib import Path

from tools.addresses import REPOSITORY, addresses, files, write

HOST = "numa.test"
PUBLISHED = {
    "image": f"{HOST}/nri-numa",
    "homepage": f"https://{HOST}/nri-numa",
    "documentation": f"https://{HOST}/nri-numa/docs",
}


def test_one_command_writes_all_addresses(tmp_path: Path) -> None:
    for path in files():
        copy = tmp_path / path.relative_to(REPOSITORY)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)
    assert set(PUBLISHED) == set(addresses())
    assert write(PUBLISHED, tmp_path)
    assert addresses(tmp_path) == PUBLISHED
    for path in files(tmp_path):
        assert not re.search(r"nri-numa\.example|localhost/nri-numa(?!/)", path.read_text()), path
    alerts = (tmp_path / "config/prometheus/alerts.yaml").read_text()
    assert f"runbook_url: {PUBLISHED['documentation']}/alerts.html#" in alerts
    # And back: nothing else was touched.
    write(addresses(), tmp_path)
    for path in files():
        assert path.read_bytes() == (tmp_path / path.relative_to(REPOSITORY)).read_bytes()


def test_no_text_installs_a_package_that_is_not_published() -> None:
    for path in [*REPOSITORY.glob("*.md"), *(REPOSITORY / "docs").rglob("*.md")]:
        assert not re.search(r"pip install ['\"]?nri-numa", path.read_text()), path
