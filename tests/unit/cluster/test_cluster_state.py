"""What is known of a cluster, and when it is something else."""

from collections.abc import Callable
from typing import Any

import pytest

from nri_numa.cluster.cluster_state import ClusterState, assumed_pod_of
from nri_numa.cluster.node_resources import NodeResources
from nri_numa.cluster.pod_reader import PodReader
from nri_numa.config import AgentConfig
from tests.beds.objects import PREFIX, single, topology


def node(**metadata: Any) -> dict[str, Any]:
    return {"metadata": {"name": "n1", **metadata}, "status": {"conditions": [{"x": 1}]}}


def known() -> ClusterState:
    state = ClusterState(PREFIX)
    state.update_node("n1", node())
    published = topology(8, 8)
    published["metadata"]["annotations"] = {
        f"{PREFIX}/renewed-at": "1",
        f"{PREFIX}/validity-seconds": "9",
    }
    state.update_topology("n1", published, 0.0)
    hold = assumed_pod_of(
        single(2, node="n1", scheduled_numa_nodes='{"main":"0"}'), PodReader(AgentConfig()), 0.0
    )
    assert hold is not None
    state.assume_pod(hold)
    return state


@pytest.mark.parametrize(
    ("change", "counts"),
    [
        (lambda state: state.update_node("n1", node()), False),
        (lambda state: state.update_node("n1", {**node(), "status": {}}), False),
        (lambda state: state.update_node("n1", node(annotations={f"{PREFIX}/drained": "1"})), True),
        (lambda state: state.remove_node("n1"), True),
        (lambda state: state.update_topology("n1", topology(8, 8), 1.0), False),
        (lambda state: state.update_topology("n1", topology(8, 7), 1.0), True),
        (lambda state: state.expire_topologies(8.0), False),
        (lambda state: state.expire_topologies(9.0), True),
        (lambda state: state.remove_topology("n1"), True),
        (lambda state: state.pod_pending_again("uid-p"), False),
        (lambda state: state.postpone_hold_check("uid-p", 5.0), False),
        (lambda state: state.pod_left_pending("uid-p", 1.0, 5.0), True),
        (lambda state: state.forget_pod("uid-p"), True),
        (lambda state: state.forget_pod("another"), False),
    ],
)
def test_each_change_has_a_revision(change: Callable[[ClusterState], object], counts: bool) -> None:
    """The page is drawn anew by it, and not sent again without it."""
    state = known()
    before = state.revision
    change(state)
    assert (state.revision != before) is counts


def test_a_pod_is_held_whichever_object_of_a_capture_comes_first() -> None:
    """As on a node that is not known yet; a pod that no one sent anywhere holds nothing."""
    held = {"kind": "Pod", **single(2, node="n1", scheduled_numa_nodes='{"main":"0"}')}
    nowhere = {"kind": "Pod", **single(2, name="q")}
    published = {"kind": "NodeResourceTopology", **topology(8, 8)}
    for documents in ([held, nowhere, published], [published, nowhere, held]):
        state = ClusterState.from_documents(documents, PodReader(AgentConfig()))
        room = state.free_resources("n1")
        assert isinstance(room, NodeResources)
        assert room.exclusive.free == (6, 8)
