"""The ValidatingAdmissionPolicies: their form, and that chart and Kustomize say the same.

What a real API server makes of them is in tests/kube/test_publish.py.
"""

import json
import re

import pytest

from nri_numa.engine.request.options import TABLE
from tests.beds.install_manifests import BASE, charted, documents

STATIC, MISTAKES = "admission/policies.yaml", "admission/mistakes.yaml"


def test_each_policy_denies_and_fails_closed() -> None:
    """And of the publisher's each is for its account: others write to Nodes, too."""
    files = [f"{file.parent.name}/{file.name}" for file in BASE.parent.glob("*/policies.yaml")]
    for one in documents(*files):
        name, spec = one["metadata"]["name"], one["spec"]
        assert spec.get("failurePolicy", "Fail") == "Fail", name
        assert spec.get("validationActions", ["Deny"]) == ["Deny"], name
        if "publish" in name and "validations" in spec:
            (condition,) = spec["matchConditions"]
            user = "system:serviceaccount:nri-numa:nri-numa-publish"
            assert condition["expression"] == f"request.userInfo.username == '{user}'"


@pytest.mark.parametrize(
    ("name", "keys", "parameters"),
    [
        ("nri-numa-lists", {"numacpu", "numamem"}, {"numamem"}),
        ("nri-numa-exclusive", {"cpus", "smt"}, {"smt"}),
    ],
)
def test_a_policy_is_about_known_keys(name: str, keys: set[str], parameters: set[str]) -> None:
    """And about those of them that a claim may have.

    That it asks for a label, in every spelling of the keys: tests/kube/test_publish.py.
    """
    policy, _ = (one["spec"] for one in documents(STATIC) if name in str(one))
    of_pods, of_claims = (one["expression"] for one in policy["validations"])
    found = set(re.findall(r"k == 'numa\.kubernetes\.io/([a-z-]+)'", of_pods))
    assert found == keys <= set(TABLE.keys)
    found = set(re.findall(r"'([a-z-]+)' in p|p\.\?([a-z-]+)", of_claims))
    named = {one or other for one, other in found}
    assert named == parameters == keys & set(TABLE.claim_parameters)


def test_the_policy_for_mistakes_knows_every_key_and_never_rejects() -> None:
    policy, binding = documents(MISTAKES)
    keys = set(re.findall(r"\(([a-z|-]*numacpu[a-z|-]*)\)", json.dumps(policy)))
    assert [set(one.split("|")) for one in keys] == [set(TABLE.keys)]
    assert policy["spec"]["failurePolicy"] == "Ignore"
    assert binding["spec"]["validationActions"] == ["Warn"]


def test_the_chart_leaves_the_policies_out_where_the_api_server_has_no_such_kind() -> None:
    name = "nri-numa-mistakes"
    assert ("ValidatingAdmissionPolicy", name) in charted("--kube-version=v1.30.2-gke.5")
    for without in ("--kube-version=v1.29.9", "--set=admission.mistakes=false"):
        assert not any(kind.startswith("Validating") for kind, _ in charted(without))
