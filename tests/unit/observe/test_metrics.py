"""Metrics: names, labels, and what a scrape costs."""

import re

from prometheus_client.parser import text_string_to_metric_families

from nri_numa.engine.state import ContainerKind, NodeState
from nri_numa.observe.metrics import Metrics, MetricsSnapshot, NUMANodeSample
from nri_numa.text import escape_unprintable
from tests.beds.allocations import allocation

HOSTILE = 'a"b\\c\n<script>\x1b\ud800'


def sample(numa_node: int) -> NUMANodeSample:
    return NUMANodeSample(
        numa_node=numa_node,
        cpus={"exclusive": 2, "idle": 0, "kubelet": 0, "shared": 5, "reserved": 1},
        capacity_cpus=8,
        allocated_cpus=4.75,
        free_cpus=3.25,
        memory_bytes=67257405440,
        memory_allocated_bytes=1 << 30,
        memory_free_bytes=1 << 34,
        capacity_factor=0.5,
        hugepages={2 << 20: (4 << 20, 2 << 20)},
    )


def state(count: int, name: str = "server") -> NodeState:
    containers = (
        allocation(f"c{n}", ContainerKind.SHARED, namespace="shop", pod=f"pod-{n}", container=name)
        for n in range(count)
    )
    return NodeState(allocations={one.container_id: one for one in containers})


def full() -> Metrics:
    metrics = Metrics("0.1.0")
    metrics.record_registration("containerd", "v2.1.9")
    metrics.record_request("CreateContainer", 0.0004)
    metrics.record_decision("rejected", "NotEnoughCPUs", "restricted")
    metrics.record_loop_lag(0.002)
    metrics.http_requests.labels("/metrics", "200").inc()
    metrics.snapshot = lambda: MetricsSnapshot(
        numa_nodes=[sample(1), sample(0)],
        node_name="worker-7",
        container_counts={("shared", True): 2, ("exclusive", False): 1},
        state=state(2),
        shared_pool_cpus=10,
        offline_cpus=1,
        checkpoint_written_timestamp_seconds=1_700_000_000.25,
    )
    return metrics


def values(metrics: Metrics) -> dict[str, float]:
    """Sample with its labels to value, as a scraper reads them."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(metrics.render_metrics()):
        for one in family.samples:
            labels = ",".join(f"{k}={v}" for k, v in sorted(one.labels.items()))
            found[f"{one.name}{{{labels}}}" if labels else one.name] = one.value
    return found


def test_what_is_counted_is_told() -> None:
    metrics = full()
    metrics.record_request("CreateContainer", 3.0)
    metrics.record_decision("rejected", "NotEnoughCPUs", "restricted")
    told = values(metrics)
    assert told["nri_numa_requests_total{event=CreateContainer}"] == 2
    assert told["nri_numa_request_duration_seconds_bucket{event=CreateContainer,le=0.0005}"] == 1
    assert told["nri_numa_request_duration_seconds_bucket{event=CreateContainer,le=2.0}"] == 1
    assert (
        told["nri_numa_decisions_total{outcome=rejected,policy=restricted,reason=NotEnoughCPUs}"]
        == 2
    )
    assert told["nri_numa_link_up"] == 1
    assert told["nri_numa_runtime_info{name=containerd,version=v2.1.9}"] == 1


def test_the_node_is_told_per_numa_node() -> None:
    told = values(full())
    assert told["nri_numa_cpus{numa_node=0,state=exclusive}"] == 2
    assert told["nri_numa_cpus{numa_node=1,state=reserved}"] == 1
    assert told["nri_numa_capacity_cpus{numa_node=0}"] == 8
    assert told["nri_numa_allocated_cpus{numa_node=0}"] == 4.75
    assert told["nri_numa_free_cpus{numa_node=0}"] == 3.25
    assert told["nri_numa_memory_bytes{numa_node=0}"] == 67257405440
    assert told["nri_numa_capacity_factor{numa_node=1}"] == 0.5
    assert told["nri_numa_hugepages_bytes{numa_node=0,page_size=2097152}"] == 4 << 20
    assert told["nri_numa_containers{aligned=true,kind=shared}"] == 2
    assert told["nri_numa_containers{aligned=false,kind=exclusive}"] == 1
    assert told["nri_numa_node_info{node_name=worker-7}"] == 1
    assert told["nri_numa_checkpoint_written_timestamp_seconds"] == 1_700_000_000.25


def test_a_configuration_that_cannot_be_used_keeps_the_time_of_the_last_one() -> None:
    metrics = Metrics("0")
    metrics.record_config_reload(loaded_at=1000.5)
    assert values(metrics)["nri_numa_config_last_reload_successful"] == 1
    metrics.record_config_reload(loaded_at=None)
    told = values(metrics)
    assert told["nri_numa_config_last_reload_successful"] == 0
    assert told["nri_numa_config_last_reload_success_timestamp_seconds"] == 1000.5


def test_a_containers_labels_are_not_those_that_a_scrape_of_pods_adds() -> None:
    """Prometheus renames labels of ours that it adds itself to exported_*."""
    metrics = full()
    (family,) = (
        f
        for f in text_string_to_metric_families(metrics.render_metrics())
        if f.name == "nri_numa_container_info"
    )
    labels = family.samples[0].labels
    assert labels["namespace"] == "shop"
    assert labels["pod"] == "pod-0"
    assert labels["container"] == "server"
    assert labels["aligned"] == "true"


def test_a_runtime_that_was_replaced_is_not_told_any_more() -> None:
    metrics = full()
    metrics.record_registration("cri-o", "1.34")
    told = [name for name in values(metrics) if "runtime_info" in name]
    assert told == ["nri_numa_runtime_info{name=cri-o,version=1.34}"]


def test_the_longest_gap_is_kept() -> None:
    metrics = Metrics("0")
    metrics.record_loop_lag(0.5)
    metrics.record_loop_lag(0.1)
    told = values(metrics)
    assert told["nri_numa_event_loop_lag_seconds"] == 0.1
    assert told["nri_numa_event_loop_max_lag_seconds"] == 0.5


def test_hostile_names_do_not_break_the_format() -> None:
    metrics = Metrics("0")
    metrics.snapshot = lambda: MetricsSnapshot(state=state(1, HOSTILE))
    families = {f.name: f for f in text_string_to_metric_families(metrics.render_metrics())}
    labels = families["nri_numa_container_info"].samples[0].labels
    assert labels["container"] == escape_unprintable(HOSTILE)


def test_names_follow_the_conventions() -> None:
    """Ours begin with nri_numa_, counters end in _total, nothing else does."""
    for family in text_string_to_metric_families(full().render_metrics()):
        if family.name.startswith("process_"):
            continue
        assert re.fullmatch(r"nri_numa_[a-z_0-9]+", family.name)
        assert family.documentation.endswith((".", "1"))
        for one in family.samples:
            assert one.name.endswith("_total") == (family.type == "counter"), one.name
            # Pods are named in one place only, and CPU lists nowhere.
            assert not {"cpus", "mems"} & set(one.labels)
            if one.name != "nri_numa_container_info":
                assert not {"pod", "container", "namespace"} & set(one.labels)


def test_a_large_node_is_told_in_short_pieces() -> None:
    """The loop gets its turn: no piece holds more rows than it can make in a millisecond or so."""
    metrics = full()
    metrics.snapshot = lambda: MetricsSnapshot(
        numa_nodes=[sample(n) for n in range(64)], state=state(1000)
    )
    pieces = list(metrics.render_chunks())
    assert max(piece.count(b"\n") for piece in pieces) <= 300
    assert b"".join(pieces).count(b"nri_numa_container_info{") == 1000
