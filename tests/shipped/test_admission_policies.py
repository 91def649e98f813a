"""The ValidatingAdmissionPolicies: their form, and that chart and Kustomize say the same.

What a real API server makes of them is in tests/kube/test_publish.py.
"""

from __future__ import annotations

import json
import re

import jsonschema
import pytest
import yaml

from nri_numa.engine.request.annotations import KEYS
from tests.shipped.test_install_manifests import CHART, charted, documents, in_the_chart

STATIC, MISTAKES = "admission/policies.yaml", "admission/mistakes.yaml"


@pytest.mark.parametrize(
    ("name", "keys"),
    [("nri-numa-lists", {"numacpu", "numamem"}), ("nri-numa-exclusive", {"cpus", "smt"})],
)
def test_a_policy_is_about_keys_that_there_are_and_fails_closed(name: str, keys: set[str]) -> None:
    """That it asks for a label, in every spelling of the keys: tests/kube/test_publish.py."""
    policy, binding = (one["spec"] for one in documents(STATIC) if name in str(one))
    assert policy["failurePolicy"] == "Fail"
    assert binding["validationActions"] == ["Deny"]
    (validation,) = policy["validations"]
    found = set(re.findall(r"k == 'numa\.kubernetes\.io/([a-z-]+)'", validation["expression"]))
    assert found == keys <= set(KEYS)


def test_the_chart_says_the_same_as_kustomize() -> None:
    on = ("--kube-version=v1.30.0", "--set", "admission.lists=true,admission.exclusive=true")
    in_the_chart(charted(*on), STATIC, MISTAKES)
    other = charted(*on, "--set", "config.annotationPrefix=example.com")
    made = [one for (kind, _), one in other.items() if kind.startswith("ValidatingAdmission")]
    assert len(made) == 6
    assert "numa.kubernetes.io" not in json.dumps([one["spec"] for one in made])


def test_the_policy_for_mistakes_knows_every_key_and_never_refuses() -> None:
    policy, binding = documents(MISTAKES)
    keys = set(re.findall(r"\(([a-z|-]*numacpu[a-z|-]*)\)", json.dumps(policy)))
    assert [set(one.split("|")) for one in keys] == [set(KEYS)]
    assert policy["spec"]["failurePolicy"] == "Ignore"
    assert binding["spec"]["validationActions"] == ["Warn"]


def test_the_chart_leaves_the_policies_out_where_the_api_server_has_no_such_kind() -> None:
    name = "nri-numa-mistakes"
    assert ("ValidatingAdmissionPolicy", name) in charted("--kube-version=v1.30.2-gke.5")
    for without in ("--kube-version=v1.29.9", "--set=admission.mistakes=false"):
        assert not any(kind.startswith("Validating") for kind, _ in charted(without))


def test_the_chart_leaves_them_off_and_checks_its_values() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    schema = json.loads((CHART / "values.schema.json").read_text())
    jsonschema.validate(values, schema)
    assert not values["admission"]["lists"]
    assert not values["admission"]["exclusive"]
    for wrong in ({"actions": ["Block"]}, {"failurePolicy": "fail"}, {"list": True}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(values | {"admission": wrong}, schema)
