"""An unpinned container has the pool: when it is left alone, and when its cpuset is widened."""

from collections.abc import Callable
from functools import partial

from nri_numa.engine.decision import Resized
from nri_numa.engine.desired import plan_corrections, recorded_actual
from nri_numa.engine.state import ContainerKind
from nri_numa.model.cpuset import CPUSet
from nri_numa.model.workload import QoSClass, Resources
from tests.beds.world import OWN, World, container, pod
from tests.machines import named as machines

usual = partial(World, machines.single_no_smt())


def plain(world: World, name: str = "plain", cpus: str = "") -> str:
    """A container that asks for nothing, perhaps with a cpuset from somebody else."""
    of = pod(name, qos=QoSClass.BEST_EFFORT)
    world.place(of, container(of, wants=Resources(cpus=cpus)))
    return f"{name}-app"


def found_in_cgroup(world: World, container_id: str, cpus: str) -> str:
    """The list that a look at a cgroup with these CPUs has written; empty for none."""
    mems = str(world.allocation(container_id).mems)
    actual = {container_id: recorded_actual(cpus, mems, None)}
    return "".join(str(one.cpus) for one in plan_corrections(world.agent.current.desired, actual))


def test_a_cgroup_is_widened_where_we_narrowed_it_or_bind_its_memory(world: World) -> None:
    """Once nobody owns CPUs any more, an operator's set is left to who came later."""
    bound, early = world.put("bound", {"numamem": "0"}), plain(world, "early")
    assert bound == ("", "0")
    assert found_in_cgroup(world, early, "2") == "", "no CPU was exclusive yet"
    assert found_in_cgroup(world, "bound-app", "2") == "0-3"
    world.put("own", OWN, 1, 1)
    world.stop("own-app")
    world.now += 1
    late = plain(world, "late")
    assert [found_in_cgroup(world, one, "2") for one in (early, late)] == ["0-3", ""]
    assert found_in_cgroup(world, early, "") == ""


def test_a_remembered_cpuset_goes_back_to_whom_we_never_narrowed(world: World) -> None:
    """The answer to an update of memory; any override makes containerd lose the swap limit."""
    world.ends_whole = False  # what nobody tells us of stays
    plain(world)
    world.unseen("plain-app", cpus="2")
    asked = Resources(memory_limit=1 << 30)
    assert answered(world, "plain-app", asked) == ""
    world.put("own", OWN, 1, 1)
    world.unseen("plain-app", cpus="0-3")
    assert answered(world, "plain-app", asked) == "1-3"
    world.stop("own-app")
    world.unseen("plain-app", cpus="1-3")
    assert answered(world, "plain-app", asked) == "0-3"


def test_a_synchronization_widens_whom_an_owner_narrowed_that_went_meanwhile(world: World) -> None:
    plain(world)
    world.put("own", OWN, 1, 1)
    assert world.has("plain-app")[0] == "1-3"
    del world.live["own-app"]
    world.now += 1
    world.restart()
    assert world.has("plain-app")[0] == "0-3"


def test_a_cpuset_of_the_kubelets_is_left_to_it_where_we_narrowed_nobody(world: World) -> None:
    """A start shows a container that is new to us; what the kubelet shared has grown since."""
    world.ends_whole = False
    world.kubelet({("granted", "app"): "0"})
    world.kubelet()
    of = pod("new", qos=QoSClass.BEST_EFFORT)
    made = world.meet(of, container(of, wants=Resources(cpus="1-3")))
    world.now += 1
    world.agent.start_container(of, made)
    assert world.allocation("new-app").kind is ContainerKind.UNPINNED
    assert world.has("new-app")[0] == "1-3"


def test_who_was_created_while_the_pool_was_narrow_starts_with_all_of_it(world: World) -> None:
    world.put("own", OWN, 1, 1)
    world.starts = False
    plain(world)
    assert world.has("plain-app")[0] == "1-3"
    world.now += 1
    world.stop("own-app")
    world.unseen("plain-app", cpus="1-3")  # its record changes, its cgroup does not
    world.agent.start_container(world.pods["sandbox-plain"], world.live["plain-app"])
    assert world.has("plain-app")[0] == "0-3"


def test_who_comes_again_while_cpus_are_given_back_is_left_alone(world: World) -> None:
    """Under the same id: a runtime may send a creation twice."""
    plain(world)
    world.put("own", OWN, 1, 1)
    later = list[Callable[[], object]]()
    world.timing.later = later.append
    world.stop("own-app")
    world.now += 1
    plain(world)
    world.sent.clear()
    while later:
        later.pop(0)()
    assert world.sent == []


def test_cpus_that_come_online_go_to_whom_we_narrowed_before(world: World) -> None:
    """What the kernel or we wrote then is a list without them; who came later has no list."""
    plain(world, "early")
    world.put("own", OWN, 1, 1)
    world.becomes(machines.single_no_smt(offline=CPUSet([3])))
    assert world.has("early-app")[0] == "1-2"
    world.stop("own-app")
    assert world.has("early-app")[0] == "0-2"
    world.now += 1
    plain(world, "late")
    world.sent.clear()
    world.becomes(machines.single_no_smt())
    assert {(one.container_id, one.cpus) for one in world.sent} == {("early-app", "0-3")}


def answered(world: World, container_id: str, asked: Resources) -> str:
    """The cpuset that an answer to an update carries for the container itself."""
    made = world.live[container_id]
    outcome = world.agent.update_container(world.pods[made.pod_id], made, asked)
    assert isinstance(outcome, Resized)
    return outcome.container_update.cpus if outcome.container_update else ""
