"""Questions of kube-scheduler, and of whoever else."""

import json

import pytest

from nri_numa.scheduler import protocol
from nri_numa.scheduler.protocol import BadRequest


def test_keys_are_read_in_any_case() -> None:
    asked = protocol.parse_extender_args(b'{"Pod":{"metadata":{}},"Nodes":null,"NodeNames":["a"]}')
    assert asked.node_names == ["a"]
    assert protocol.parse_extender_args(b'{"pod":{},"nodenames":[]}').node_names == []
    found = protocol.parse_binding_args(
        b'{"PodName":"p","podNamespace":"n","PodUID":"u","Node":"a"}'
    )
    assert (found.namespace, found.name, found.uid, found.node) == ("n", "p", "u", "a")


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b"", "no JSON"),
        (b"{", "no JSON"),
        (b"\xff\xfe", "no JSON"),
        (b"[" * 100_000, "no JSON"),
        (b"[]", "expected ExtenderArgs"),
        (b"{}", "Pod is not there"),
        (b'{"Pod":3}', "Pod is not there"),
        (b'{"Pod":{},"Nodes":{"items":[]},"NodeNames":null}', "nodeCacheCapable: true"),
        (b'{"Pod":{},"NodeNames":"a"}', "no list"),
        (b'{"Pod":{},"NodeNames":[1]}', "something else than names"),
    ],
)
def test_what_is_no_question(body: bytes, text: str) -> None:
    with pytest.raises(BadRequest, match=text):
        protocol.parse_extender_args(body)


@pytest.mark.parametrize("missing", ["PodName", "PodNamespace", "PodUID", "Node"])
def test_what_is_no_binding(missing: str) -> None:
    whole = {"PodName": "p", "PodNamespace": "n", "PodUID": "u", "Node": "a"}
    for value in (None, "", 3, "a/../b", "x" * 600):
        with pytest.raises(BadRequest, match=missing):
            protocol.parse_binding_args(json.dumps({**whole, missing: value}).encode())


def test_answers_have_the_names_of_the_go_structs() -> None:
    assert json.loads(protocol.encode_filter_result(["a"], {"b": "full"}, {"c": "never"})) == {
        "NodeNames": ["a"],
        "FailedNodes": {"b": "full"},
        "FailedAndUnresolvableNodes": {"c": "never"},
        "Error": "",
    }
    assert json.loads(protocol.encode_priorities([("a", 7)])) == [{"Host": "a", "Score": 7}]
    assert json.loads(protocol.encode_error("no")) == {"Error": "no"}
