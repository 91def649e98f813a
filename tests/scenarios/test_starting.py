"""Containers between their creation and their start: what changes meanwhile is there in time.

The runtime takes updates of such containers down and applies them to nobody. `Kernel` is the
cgroups: made with what the runtime had written down when the start began, and changed by us alone.
"""

import pytest
from msgspec.structs import replace

from nri_numa.agent.confirmations import WriteTarget
from nri_numa.engine.state import ContainerKind
from nri_numa.machine.cgroups import NO_CGROUP_OUTCOME, CgroupPlace, WriteOutcome
from nri_numa.model.cpuset import CPUSet
from nri_numa.model.workload import Container, PodSandbox, Resources
from tests.beds.agent_bed import AgentBed
from tests.beds.world import OWN, container, pod, resources
from tests.machines import named as machines


class Kernel:
    """Cgroups by path, with the CPUs they have; written to by the agent."""

    def __init__(self) -> None:
        self.cgroups: dict[str, str] = {}
        self.mems: dict[str, str] = {}
        self.problem = ""

    def write(self, place: CgroupPlace, cpus: str, mems: str) -> WriteOutcome:
        path = place.cgroups_path
        if mems:
            self.mems[path] = mems
        if path not in self.cgroups:
            return NO_CGROUP_OUTCOME
        if self.problem:
            return WriteOutcome(problem=self.problem)
        changed = bool(mems) or self.cgroups[path] != cpus
        self.cgroups[path] = cpus or self.cgroups[path]
        return WriteOutcome(changed=changed)


class StartingBed(AgentBed):
    """A node whose containers start in steps."""

    def __init__(self, *, observe: bool = False) -> None:
        self.kernel = Kernel()
        super().__init__(machines.single_no_smt(), observe=observe, write=self.kernel.write)
        self.synchronize()

    def path(self, name: str) -> str:
        return f"/pods/{name}-app"

    def decide(self, name: str, annotations: dict[str, str] | None = None, cpus: float = 0) -> None:
        """Create a pod's container; nobody has made its cgroup yet."""
        of = pod(name, annotations)
        made = container(of, wants=resources(cpus, 1) if cpus else Resources())
        self.place(of, replace(made, cgroups_path=self.path(name)))

    def task(self, name: str) -> None:
        """The OCI runtime makes the cgroup, from what is written down at this moment."""
        self.kernel.cgroups[self.path(name)] = self.has(f"{name}-app")[0] or "0-3"

    def event(self, name: str) -> tuple[PodSandbox, Container]:
        made = self.live[f"{name}-app"]
        return self.pods[made.pod_id], replace(made, pid=42)

    def start(self, name: str) -> None:
        self.agent.start_container(*self.event(name))

    def started(self, name: str) -> None:
        self.agent.post_start_container(*self.event(name))

    def cgroup(self, name: str) -> str:
        """CPUs that its cgroup has."""
        return self.kernel.cgroups[self.path(name)]


@pytest.fixture
def node() -> StartingBed:
    return StartingBed()


def test_an_owner_that_comes_between_create_and_start_is_alone_from_the_first_instruction() -> None:
    node = StartingBed()
    node.decide("plain")
    node.task("plain")  # the bundle has all CPUs, and keeps them whatever is written down later
    node.decide("own", OWN, 2)
    assert node.cgroup("plain") == "0-3"
    node.start("plain")
    assert node.cgroup("plain") == node.has("plain-app")[0] == "2-3"
    assert node.count("start_corrections_total") == 1
    node.check()


def test_an_owner_that_comes_while_the_program_is_started_is_alone_before_it_is_answered() -> None:
    node = StartingBed()
    node.decide("plain")
    node.task("plain")
    node.start("plain")
    node.decide("own", OWN, 2)
    assert node.cgroup("plain") == "2-3"
    node.started("plain")
    node.stop("own-app")
    assert node.cgroup("plain") == "0-3"


def test_who_is_created_narrow_and_started_without_owner_has_everything(node: StartingBed) -> None:
    node.decide("own", OWN, 2)
    node.decide("plain")
    node.task("plain")
    node.stop("own-app")
    node.start("plain")
    assert node.cgroup("plain") == "0-3"


def test_nothing_is_written_where_nothing_changed(node: StartingBed) -> None:
    node.decide("own", OWN, 2)
    node.decide("plain")
    node.kernel.cgroups[node.path("plain")] = "as somebody wrote it"
    node.start("plain")
    assert node.cgroup("plain") == "as somebody wrote it"
    assert node.count("start_corrections_total") == 0


def test_a_cgroup_that_is_right_already_is_no_correction(node: StartingBed) -> None:
    """The update came before the bundle was made."""
    node.decide("plain")
    node.decide("own", OWN, 2)
    node.task("plain")
    node.start("plain")
    assert node.cgroup("plain") == "2-3"
    assert node.count("start_corrections_total") == 0


def test_a_resize_between_create_and_start_counts_too(node: StartingBed) -> None:
    node.decide("own", OWN, 1)
    node.task("own")
    assert node.update("own-app", resources(2, 1)) is None
    node.start("own")
    assert node.cgroup("own") == node.has("own-app")[0] == "0-1"


def test_every_container_is_looked_at_as_soon_as_it_runs(node: StartingBed) -> None:
    """Its cgroup may not have been written before."""
    node.decide("plain")
    node.task("plain")
    node.decide("own", OWN, 2)
    node.kernel.problem = "read-only file system"
    node.start("plain")
    assert node.cgroup("plain") == "0-3"
    node.started("plain")
    assert list(node.agent.cgroups.confirmations[WriteTarget.CGROUP].required_ids()) == [
        "plain-app"
    ]


def test_a_container_that_was_created_before_we_came_may_be_anywhere_in_its_start() -> None:
    node = StartingBed()
    node.decide("plain")
    node.decide("own", OWN, 2)
    node.boot()
    agent = node.agent
    # The runtime's record has everything: our update was lost with the connection.
    lost = node.live["plain-app"]
    node.live["plain-app"] = replace(
        lost, starting=True, resources=replace(lost.resources, cpus="")
    )
    node.task("plain")
    node.synchronize()
    assert node.cgroup("plain") == "2-3"  # it may run already
    assert "plain-app" in agent.containers.starting


def test_a_container_without_a_cgroup_yet_is_written_when_it_has_one(node: StartingBed) -> None:
    node.decide("plain")
    made = node.live["plain-app"]
    node.live["plain-app"] = replace(made, starting=True)
    node.synchronize()
    node.decide("own", OWN, 2)
    node.kernel.cgroups[node.path("plain")] = "0-3"  # from the record of before
    node.start("plain")
    assert node.cgroup("plain") == "2-3"


def test_a_start_tells_of_a_container_whose_creation_was_lost(node: StartingBed) -> None:
    """NRI before 0.7 can lose a creation that falls into a registration (nri#63)."""
    node.decide("plain")
    node.task("plain")
    node.start("plain")
    node.started("plain")
    of = pod("own", OWN)
    made = replace(container(of, wants=resources(2, 1)), cgroups_path=node.path("own"))
    node.meet(of, made)
    node.task("own")
    node.start("own")
    allocation = node.agent.current.state.allocations["own-app"]
    assert allocation.kind is ContainerKind.EXCLUSIVE
    assert node.cgroup("own") == str(allocation.cpus) == "0-1"
    assert node.count("missed_starts_total") == 1
    assert node.cgroup("plain") == "2-3"


def test_a_lost_creation_that_cannot_be_placed_runs_unpinned(node: StartingBed) -> None:
    node.meet(pod("huge", OWN), wants=resources(64, 1))
    node.start("huge")
    assert node.agent.current.state.allocations["huge-app"].kind is ContainerKind.UNPINNED
    assert [r.pod for r in node.agent.history.rejections] == ["huge"]


def test_the_end_of_a_start_tells_of_it_too(node: StartingBed) -> None:
    node.meet(pod("plain"))
    node.started("plain")
    assert node.agent.current.state.allocations["plain-app"].kind is ContainerKind.UNPINNED


def test_a_program_that_ends_before_the_runtime_says_that_it_runs_is_not_taken_in_again() -> None:
    node = StartingBed()
    node.decide("short", OWN, 2)
    event = node.event("short")
    node.agent.start_container(*event)
    node.stop("short-app")
    node.agent.post_start_container(*event)
    node.agent.start_container(*event)
    assert node.agent.current.state.allocations == {}
    assert node.agent.containers.cgroup_places == {}


def test_ids_of_the_ended_are_not_kept_for_ever(node: StartingBed) -> None:
    for n in range(300):
        node.decide(f"p{n}")
        node.stop(f"p{n}-app")
    assert len(node.agent.containers.ended) == 256
    assert len(node.agent.containers.starting) == 0


@pytest.mark.parametrize("moment", ["start", "started"])
def test_observe_writes_nothing(moment: str) -> None:
    node = StartingBed(observe=True)
    node.decide("plain")
    node.task("plain")
    node.decide("own", OWN, 2)
    getattr(node, moment)("plain")
    of = pod("unknown")
    node.pods[of.id], node.live["unknown-app"] = of, container(of)
    getattr(node, moment)("unknown")
    assert node.cgroup("plain") == "0-3"
    assert node.agent.current.state.allocations["unknown-app"].kind is ContainerKind.UNPINNED


def test_somebody_elses_pin_is_left_alone(node: StartingBed) -> None:
    of = pod("foreign")
    made = container(of, wants=Resources(cpus="3"))
    node.place(of, replace(made, cgroups_path=node.path("foreign")))
    node.task("foreign")
    node.start("foreign")
    node.decide("own", OWN, 2)
    assert node.cgroup("foreign") == "3"


def test_cpus_that_go_offline_during_a_start_are_written_too(node: StartingBed) -> None:
    node.decide("own", OWN, 2)
    node.decide("plain")
    node.task("plain")
    node.start("plain")
    topology = node.topology
    left = topology.online & CPUSet.parse("0-2")
    topology = replace(topology, online=left, allowed=left)
    told: list[CPUSet] = []
    node.agent.current.subscribe(lambda: told.append(node.agent.current.machine.topology.online))
    node.agent.apply_node_model(replace(node.agent.current.machine, topology=topology))
    assert node.cgroup("plain") == "2"
    assert told == [left], "who shows the node shows it as it is now"


def test_the_log_says_whose_cpus_an_owner_moved(node: StartingBed) -> None:
    for n in range(7):
        node.decide(f"p{n}")
    node.decide("own", OWN, 2)
    [line] = node.log("shared pool changed")
    assert "pod=default/own container=app" in line
    assert "pool_before=0-3 pool=2-3" in line
    assert "default/p0/app 0-3 -> 2-3" in line
    assert "and 2 more" in line


def test_the_log_has_the_sizes_of_a_resize_and_the_desired_cpuset(node: StartingBed) -> None:
    node.decide("own", OWN, 1)
    node.update("own-app", resources(2, 1))
    node.update("own-app", Resources(cpus="3"))
    assert node.log('cpu_milli="1000 -> 2000"')
    [line] = node.log("requested cpuset overridden")
    assert "requested_cpus=3 actual_cpus=0-1" in line


@pytest.mark.parametrize(
    ("problem", "said"),
    [
        ("", "starting container corrected"),
        ("read-only file system", "starting container not corrected"),
    ],
)
def test_the_log_has_results_of_corrections(problem: str, said: str, node: StartingBed) -> None:
    node.kernel.problem = problem
    node.decide("plain")
    node.task("plain")
    node.start("plain")
    words = ("starting container corrected", "starting container not corrected")
    assert not any(node.log(word) for word in words), "nothing was to be corrected"
    node.decide("own", OWN, 2)
    [line] = [x for x in node.log() if any(word in x for word in words)]
    assert said in line
    assert problem in line


def test_strangers_that_ask_for_nothing_are_in_the_log_too(node: StartingBed) -> None:
    for name in ("one", "two"):
        node.meet(pod(name))
    node.synchronize()
    lines = node.log("container placed")
    assert ["update_count=0" in x for x in lines] == [True, True]
    assert [name in x for name, x in zip(("one", "two"), lines, strict=True)] == [True, True]


def test_a_container_found_at_its_start_is_marked_in_the_log(node: StartingBed) -> None:
    node.meet(pod("own", OWN), wants=resources(2, 1))
    node.start("own")
    [line] = node.log("container placed")
    assert "missed_start=true" in line


def test_a_container_that_our_answer_never_reached_is_a_gap_and_no_drift(node: StartingBed) -> None:
    """A plugin that hung answers a creation that the runtime has long gone on with."""
    node.decide("own", OWN, 2)
    node.unseen("own-app", cpus="")
    node.synchronize()
    assert node.count("missed_starts_total") == 1
    assert node.count("drift_found_total") == 0
    node.check()


def test_a_running_container_that_the_runtime_has_elsewhere_is_drift(node: StartingBed) -> None:
    node.decide("own", OWN, 2)
    node.start("own")
    node.started("own")
    node.unseen("own-app", cpus="3")
    node.synchronize()
    assert node.count("missed_starts_total") == 0
    assert node.count("drift_found_total") == 1


def test_memory_nodes_too_are_there_before_a_container_runs_that_nobody_told_us_of() -> None:
    """Created while we were away, started when we are back: the record of before has all nodes."""
    node = StartingBed()
    of = pod("listed", {"numamem": "0", "numacpu": "1"})
    node.meet(of, replace(container(of), cgroups_path=node.path("listed"), starting=True))
    node.task("listed")
    node.synchronize()
    node.start("listed")
    assert node.cgroup("listed") == "1"
    assert node.kernel.mems[node.path("listed")] == "0"
    assert node.count("start_corrections_total") == 1
