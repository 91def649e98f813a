"""The search for victims against a model that tries every set of pods."""

import os

from nri_numa.scheduler.eviction_search import Eviction, select_victims
from nri_numa.scheduler.fit import WorkBudget
from tests.beds.eviction_model import EVICTABLE, RandomNode

NODES = int(os.environ.get("NRI_NUMA_EVICTION_NODES", "400"))
"""Random nodes; 10,000 take a minute."""


def test_the_cheapest_eviction_is_that_of_the_model() -> None:
    fits = 0
    for seed in range(NODES):
        node = RandomNode(seed)
        if node.lacking(()) and not node.proposed:
            continue  # kube-scheduler would not name this node
        found, cheapest = select_victims(node.candidate(), EVICTABLE, WorkBudget()), node.cheapest()
        assert isinstance(found, Eviction) == (cheapest is not None), seed
        if isinstance(found, Eviction) and cheapest is not None:
            uids = {pod.uid for pod in found.pods}
            evicted = [pod for pod in node.pods if pod.uid in uids]
            assert node.fits_without(evicted), seed
            assert (node.cost(evicted), found.violations) == (cheapest, cheapest[0]), seed
            fits += bool(evicted)
    assert fits > NODES // 4
