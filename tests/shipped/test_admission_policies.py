"""The ValidatingAdmissionPolicies: their form, and that chart and Kustomize say the same.

What a real API server makes of them is in tests/kube/test_publish.py.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from nri_numa.engine.request.annotations import KEYS
from tests.shipped.test_install_manifests import charted, in_the_chart

REPOSITORY = Path(__file__).resolve().parents[2]
STATIC = REPOSITORY / "config/kubernetes/admission/policies.yaml"
MISTAKES = STATIC.with_name("mistakes.yaml")
CHART = REPOSITORY / "config/helm/nri-numa"


def policies() -> dict[str, dict[str, dict[str, Any]]]:
    """The policies by name, each with its binding, by kind."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for document in yaml.safe_load_all(STATIC.read_text()):
        found.setdefault(document["metadata"]["name"], {})[document["kind"]] = document
    return found


@pytest.mark.parametrize(
    ("name", "label", "keys"),
    [
        ("nri-numa-lists", "numacpu=allowed", {"numacpu", "numamem"}),
        ("nri-numa-exclusive", "cpus=exclusive", {"cpus", "smt"}),
    ],
)
def test_a_policy_asks_for_a_label_of_the_namespace(name: str, label: str, keys: set[str]) -> None:
    label_key, _, label_value = label.partition("=")
    one = policies()[name]
    assert set(one) == {"ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding"}
    assert {d["apiVersion"] for d in one.values()} == {"admissionregistration.k8s.io/v1"}
    spec = one["ValidatingAdmissionPolicy"]["spec"]
    assert spec["failurePolicy"] == "Fail"
    (rule,) = spec["matchConstraints"]["resourceRules"]
    assert rule == {
        "apiGroups": [""],
        "apiVersions": ["v1"],
        "operations": ["CREATE", "UPDATE"],
        "resources": ["pods", "pods/status"],
    }
    (validation,) = spec["validations"]
    expression, message = validation["expression"], validation["message"]
    assert "\n" not in message, "the API server refuses a message of several lines"
    assert f"numa.kubernetes.io/{label}" in message
    assert expression.count("(") == expression.count(")")
    assert expression.count("'") % 2 == 0
    # Each key in every spelling that the node reads.
    for key in keys:
        for spelling in (
            f"k == 'numa.kubernetes.io/{key}'",
            f"k.startsWith('numa.kubernetes.io/{key}.')",
            f"k.startsWith('{key}.numa.kubernetes.io/')",
        ):
            assert spelling in expression
    assert set(re.findall(r"k == 'numa\.kubernetes\.io/([a-z-]+)'", expression)) == keys
    assert keys <= set(KEYS)
    binding = one["ValidatingAdmissionPolicyBinding"]["spec"]
    assert binding["policyName"] == name
    assert binding["validationActions"] == ["Deny"]
    (needed,) = binding["matchResources"]["namespaceSelector"]["matchExpressions"]
    assert needed == {
        "key": f"numa.kubernetes.io/{label_key}",
        "operator": "NotIn",
        "values": [label_value],
    }


def test_the_chart_says_the_same_as_kustomize() -> None:
    on = ("--kube-version=v1.30.0", "--set", "admission.lists=true,admission.exclusive=true")
    in_the_chart(charted(*on), "admission/policies.yaml", "admission/mistakes.yaml")
    other = charted(*on, "--set", "config.annotationPrefix=example.com")
    made = [one for (kind, _), one in other.items() if kind.startswith("ValidatingAdmission")]
    assert len(made) == 6
    assert "numa.kubernetes.io" not in json.dumps([one["spec"] for one in made])


def test_the_policy_for_mistakes_knows_every_key_and_never_refuses() -> None:
    policy, binding = yaml.safe_load_all(MISTAKES.read_text())
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
