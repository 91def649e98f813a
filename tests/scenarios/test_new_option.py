"""A key that is added to the table is found wherever keys are, without a change elsewhere."""

from enum import StrEnum
from typing import Annotated, Any

import pytest

from nri_numa import config
from nri_numa.cli.simulate_output import explain_outcome
from nri_numa.dra.claims import InvalidClaim, parse_claim
from nri_numa.engine.explain.explanation import ExplanationDocument
from nri_numa.engine.explain.sentences import explanation_sentences
from nri_numa.engine.request import options
from nri_numa.engine.request.options import Option, OptionTable, PlacementOptions
from nri_numa.errors import ConfigError
from tests.machines.named import snc_smt
from tests.machines.pods import pod, run, the
from tools import config_schema, docs_options

UID = "0a1b2c3d-0000-4000-8000-00000000000a"
PLACED = {"policy": "best-effort"}
DID_YOU_MEAN = "one of red, blue (did you mean blue?)"


class Colour(StrEnum):
    """Paints."""

    RED = "red"
    BLUE = "blue"


class ColouredOptions(PlacementOptions, frozen=True, kw_only=True):
    """The product's options and one more."""

    colour: Annotated[
        Colour, Option(summary="its paint", meanings={"red": "it is seen", "blue": "it is calm"})
    ] = Colour.RED


@pytest.fixture(autouse=True)
def colour_is_an_option(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "TABLE", OptionTable.of(ColouredOptions))


def explained(wishes: dict[str, str], text: str = "") -> ExplanationDocument:
    """Simulate's explanation of a container."""
    settings = config.derive_settings(config.load_config(text=text))
    outcome = the(run(snc_smt(), pod("web", 1, "1Gi", PLACED | wishes), settings=settings))
    return explain_outcome(outcome)


def asked(wishes: dict[str, str], text: str = "") -> tuple[list[Any], str]:
    """What the explanation says was asked for about the colour, and its whole text."""
    document = explained(wishes, text)
    colours = [one for one in document.get("options", ()) if one["key"] == "colour"]
    return colours, " ".join(explanation_sentences(document))


def problem(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        config.load_config(text=text)
    return str(caught.value)


@pytest.mark.parametrize(
    ("wishes", "text", "source"),
    [
        ({"colour": "blue"}, "", "annotation numa.kubernetes.io/colour"),
        ({"colour": "red", "colour.app": "blue"}, "", "annotation numa.kubernetes.io/colour.app"),
        ({}, "rules: [{set: {colour: blue}}]", "rule 1"),
        ({}, "defaults: {colour: blue}", "default"),
        (
            {"colour": "blue"},
            "permissions: [{allowedKeys: [policy, colour], allowedValues: {colour: [blue]}}]",
            "annotation numa.kubernetes.io/colour",
        ),
    ],
)
def test_a_value_is_explained_by_source(wishes: dict[str, str], text: str, source: str) -> None:
    colours, sentences = asked(wishes, text)
    assert colours == [{"key": "colour", "value": "blue", "source": source}]
    assert f"colour: blue ({source}): it is calm." in sentences


def test_a_version_without_the_key_shows_explanations(monkeypatch: pytest.MonkeyPatch) -> None:
    document = explained({"colour": "blue"})
    monkeypatch.setattr(options, "TABLE", OptionTable.of(PlacementOptions))
    source = "annotation numa.kubernetes.io/colour"
    assert f"colour: blue ({source}): not known to this version." in explanation_sentences(document)


@pytest.mark.parametrize("key", ["colour", "colour.app"])
def test_a_bad_annotation_is_rejected_with_a_suggestion(key: str) -> None:
    assert DID_YOU_MEAN in asked({key: "bleu"})[1]
    assert "(did you mean colour?)" in asked({key.replace("colour", "color"): "blue"})[1]


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("rules: [{set: {colour: bleu}}]", "rules[0].set.colour"),
        ("defaults: {colour: bleu}", "defaults.colour"),
        ("permissions: [{allowedValues: {colour: [bleu]}}]", "permissions[0].allowedValues.colour"),
    ],
)
def test_a_bad_value_of_the_operator_is_rejected_with_a_suggestion(text: str, path: str) -> None:
    message = problem(text)
    assert path in message
    assert DID_YOU_MEAN in message
    assert "(did you mean colour?)" in problem(text.replace("colour", "color"))


def test_a_permission_says_which_values_it_allows() -> None:
    only = "permissions: [{allowedValues: {colour: [red]}}]"
    assert (
        "expected one of red, because permissions[0] allows no more"
        in asked({"colour": "blue"}, only)[1]
    )


def claim(parameters: dict[str, str]) -> Any:
    result = {"request": "r", "driver": "d", "pool": "n", "device": "numa0"}
    result |= {"consumedCapacity": {"d/cpu": "1"}}
    opaque = {"opaque": {"driver": "d", "parameters": parameters}}
    return parse_claim(
        {
            "metadata": {"uid": UID, "namespace": "shop", "name": "one"},
            "status": {"allocation": {"devices": {"results": [result], "config": [opaque]}}},
        },
        driver="d",
        pool="n",
    )


def test_a_claim_may_set_it() -> None:
    assert claim({"colour": "blue"}).results[0].parameters == {"colour": "blue"}
    with pytest.raises(InvalidClaim, match="expected one of bind, colour, devices"):
        claim({"color": "blue"})


def test_the_schema_and_the_reference_have_it() -> None:
    definitions = config_schema.document()["$defs"]
    described = {"description": "Its paint.", "enum": ["red", "blue"]}
    for name, field in (("AgentConfig", "defaults"), ("RuleDocument", "set")):
        assert definitions[name]["properties"][field]["properties"]["colour"] == described
    values = definitions["PermissionDocument"]["properties"]["allowedValues"]["properties"]
    assert values["colour"] == {"type": "array", "items": described}
    row = "| [`colour`](#colour) | its paint | `red`, `blue` | `red` |"
    assert row in docs_options.text().splitlines()
