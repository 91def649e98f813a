"""Keys and values of earlier configurations: each is rejected with what to write instead."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from nri_numa.config import layers, sections
from nri_numa.config.old_keys import OLD_KEYS
from tests.beds.cli import invoke

KEYS = {
    *sections.config_keys(),
    *(f"permissions[].{key}" for key in sections.PermissionDocument.__struct_encode_fields__),
}


def document_with(old: str, value: object) -> dict[str, Any]:
    """The smallest document with a key; ``permissions[].keys`` is a key of a list's first item."""
    head, is_item, key = old.partition("[].")
    gathered = layers.LayeredDocument()
    gathered.set_key(head, [{key: value}] if is_item else value, "")
    return gathered.document


def rejection_of(old: str) -> str:
    """The line that names an old key, or an old value of a key."""
    path, _, value = old.partition(": ")
    value_text = f'"{value}" ' if value else ""
    return f"{path.replace('[]', '[0]')}: {value_text}{OLD_KEYS[old]}"


def messages_of_check(*options: str) -> str:
    result = invoke("check", "-o", "json", *options, code=2)
    return "\n".join(each["message"] for each in json.loads(result.output)["findings"])


@pytest.mark.parametrize("old", OLD_KEYS)
def test_a_file_with_an_old_key_is_rejected_with_the_new_one(tmp_path: Path, old: str) -> None:
    path, _, value = old.partition(": ")
    file = tmp_path / "agent.yaml"
    for each in (value,) if value else (True, {"other": 1}):
        file.write_text(json.dumps(document_with(path, each)))
        assert messages_of_check("--config", str(file)) == rejection_of(old)


@pytest.mark.parametrize("old", OLD_KEYS)
def test_an_environment_variable_of_an_old_key_is_rejected_with_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: str
) -> None:
    path, _, value = old.partition(": ")
    (file := tmp_path / "agent.yaml").touch()
    if "[]" in path:
        ((key, items),) = document_with(path, value or True).items()
        name, rejection = layers.build_environment_name(key), rejection_of(old)
        monkeypatch.setenv(name, json.dumps(items))
    else:
        name = layers.build_environment_name(path)
        rejection = rejection_of(old) if value else f"environment {name}: {OLD_KEYS[old]}"
        monkeypatch.setenv(name, value or "true")
    origin = f" (from environment {name})" if rejection == rejection_of(old) else ""
    assert messages_of_check("--config", str(file)) == f"{rejection}{origin}"


@pytest.mark.parametrize("old", [old for old in OLD_KEYS if "[]" not in old])
def test_an_option_with_an_old_key_is_rejected_with_the_new_one(tmp_path: Path, old: str) -> None:
    path, _, value = old.partition(": ")
    (pod := tmp_path / "pod.yaml").touch()
    result = invoke("simulate", str(pod), "--set", f"{path}={value or 1}", code=2)
    assert OLD_KEYS[old] in " ".join(result.output.split())


@pytest.mark.parametrize(("old", "sentence"), OLD_KEYS.items())
def test_what_replaces_an_old_key_exists(old: str, sentence: str) -> None:
    path, _, value = old.partition(": ")
    expected = sentence.partition("expected ")[2]
    if value:
        assert layers.load_config(text=json.dumps(document_with(path, expected)))
    elif not expected.startswith("no such key"):
        new = re.split("[:,]", expected)[0]
        assert any(f"{key}.".startswith(f"{new}.") for key in KEYS), new


def test_a_section_of_another_name_is_told_by_its_keys() -> None:
    """Only a key that had no other name is told by the section's sentence."""
    problems = layers.structural_problems({"room": {"moves": 1, "keep": {}}})[0]
    assert [problem.partition(":")[0] for problem in problems] == ["room.moves", "room.keep"]
    problems = layers.structural_problems({"room": {}})[0]
    assert problems == ["room: is gone, expected rebalance"]
