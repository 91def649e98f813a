"""What is said about packages and licences is complete, and is what a node gets."""

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.licenses import canonicalize_license_expression
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tools import licences, sbom
from tools.build_image import pins, requirements

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    return sbom.document()


def wheels(document: dict[str, Any]) -> list[dict[str, Any]]:
    """The packages of Python; the interpreter's are Debian's."""
    return [each for each in document["components"] if each["purl"].startswith("pkg:pypi/")]


def test_every_dependency_of_the_project_is_listed(document: dict[str, Any]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = {canonicalize_name(Requirement(each).name) for each in project["dependencies"]}
    listed = {each["name"] for each in document["components"]}
    assert needed <= listed
    table = licences.text()
    for each in wheels(document):
        assert f"| {each['name']} {each['version']} |" in table.lower().replace("_", "-")


def test_it_is_what_a_node_gets(document: dict[str, Any]) -> None:
    """No package more, none less, each with the hashes that pip asks for."""
    assert {each["name"]: each["version"] for each in wheels(document)} == pins()
    locked = sbom.hashes()
    for each in wheels(document):
        assert [one["content"] for one in each["hashes"]] == locked[each["name"]] != []


def test_every_reference_leads_to_a_package(document: dict[str, Any]) -> None:
    known = {each["bom-ref"] for each in document["components"]}
    known.add(document["metadata"]["component"]["bom-ref"])
    edges = {each["ref"]: each["dependsOn"] for each in document["dependencies"]}
    assert edges.keys() == known
    reached, waiting = set(), [document["metadata"]["component"]["bom-ref"]]
    while waiting:
        reference = waiting.pop()
        if reference not in reached:
            reached.add(reference)
            waiting += edges[reference]
    assert reached == known


def test_every_licence_is_an_expression_and_its_text_goes_along() -> None:
    for distribution in requirements():
        canonicalize_license_expression(licences.licence(distribution))
        # A pip without the wheel package builds source archives the old way, which keeps no text.
        old = not any(".dist-info/" in str(file) for file in distribution.files or ())
        assert old or licences.texts(distribution), distribution.name


def test_a_licence_that_nobody_has_looked_at_is_an_error(tmp_path: Path) -> None:
    folder = tmp_path / "strange-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: strange\nVersion: 1.0\n")
    (strange,) = licences.importlib.metadata.distributions(path=[str(tmp_path)])
    with pytest.raises(SystemExit, match=r"strange 1\.0: its licence is ''"):
        licences.licence(strange)


def test_it_has_no_addresses(document: dict[str, Any]) -> None:
    """That two runs give the same bytes is in test_reproducible.py."""
    assert "://" not in json.dumps(document)
    assert document["specVersion"] == "1.5"
