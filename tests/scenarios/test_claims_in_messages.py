"""A container is known to belong to a claim by its environment, in every message of the runtime."""

from __future__ import annotations

from pathlib import Path

import pytest

from nri_numa.agent.handler import AgentHandler
from nri_numa.dra.claims import variable
from nri_numa.model.cpuset import CPUSet
from nri_numa.nri.wire.pb import nri_pb2 as pb
from nri_numa.nri.wire.versions import Event
from nri_numa.runtime import RequestRefused
from tests.beds.nri_requests import NRIRequests
from tests.unit.agent.test_claims import Bed
from tests.unit.dra.test_claims import UID, config, result

POD = pb.PodSandbox(id="s-web", uid="uid-web", namespace="default", name="web")


def container(id: str = "c-web", *, claim: str = UID, cpus: int = 4) -> pb.Container:
    made = pb.Container(id=id, pod_sandbox_id="s-web", name="app")
    made.env.extend(["PATH=/bin", f"{variable(claim, 0)}=cpus"])
    cpu = made.linux.resources.cpu
    cpu.shares.value, cpu.quota.value, cpu.period.value = 1024 * cpus, 100_000 * cpus, 100_000
    return made


@pytest.fixture
def bed(tmp_path: Path) -> Bed:
    made = Bed(tmp_path)
    made.objects[UID] = made.claim(result(), configs=[config({"smt": "isolate"})])
    made.prepare()
    return made


def link(bed: Bed) -> NRIRequests:
    return NRIRequests(AgentHandler(bed.world.agent, bed.world.metrics, claims=bed.book))


def cpus(bed: Bed, id: str = "c-web") -> CPUSet:
    allocation = bed.world.allocation(id)
    assert "claim" in allocation.slots
    return allocation.cpus


def test_when_it_is_created_resized_and_met_again(bed: Bed) -> None:
    requests = link(bed)
    request = pb.CreateContainerRequest(pod=POD, container=container())
    answer = pb.CreateContainerResponse.FromString(requests.create_container(request))
    own = cpus(bed)
    assert answer.adjust.linux.resources.cpu.cpus == str(own)
    assert (len(own), own <= CPUSet.parse("9-15")) == (4, True)
    variables = {one.key: one.value for one in answer.adjust.env}
    assert variables[f"DRA_CPUSET_{UID}"] == str(own)

    update = pb.UpdateContainerRequest(pod=POD, container=container())
    update.linux_resources.cpu.shares.value = 4096
    requests.update_container(update)
    for event in (Event.START_CONTAINER, Event.POST_START_CONTAINER):
        requests.container_event(event, POD, container())
    assert cpus(bed) == own

    # Agent and book are new processes, which know what is on disk.
    bed.world.boot()
    bed.boot()
    running = container()
    running.linux.resources.cpu.cpus = str(own)
    other = pb.Container(id="c-other", pod_sandbox_id="s-gone", name="app")
    link(bed).synchronize([POD], [running, other])
    assert cpus(bed) == own


def test_a_container_that_started_while_nobody_was_there(bed: Bed) -> None:
    running = container()
    running.linux.resources.cpu.cpus = "0-15"
    link(bed).synchronize([POD], [running])
    assert len(cpus(bed)) == 4


def test_what_does_not_count_is_refused(bed: Bed) -> None:
    made = container(claim=UID[:-1] + "f")
    with pytest.raises(RequestRefused, match="ClaimNotPrepared"):
        link(bed).create_container(pb.CreateContainerRequest(pod=POD, container=made))
