"""Pods that are resized in any order, whenever their sum is told: each has its size, and no more.

The model is sums: an owner has its size, a pool what the owners leave of the pod's sum.
"""

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from nri_numa.engine.decision import Rejected
from nri_numa.model.workload import Resources
from tests.beds.world import GIB, World, container, pod, resources
from tests.machines import named as machines

TOPOLOGY = machines.dual_no_smt(cores_per_numa=32, memory_gib=64)
SIZES = st.sampled_from([500, 1000, 2000, 3000, 4000])
steps = st.lists(
    st.tuples(
        st.sampled_from(["own", "own", "pod", "again", "away", "lost"]),
        st.integers(0, 3), SIZES, st.booleans(),
    ),
    max_size=8,
)  # fmt: skip


class Model:
    """A pod of a node, and what its containers should have."""

    def __init__(self, owners: list[int], sharers: int, extra: int) -> None:
        self.world, self.sharers = World(TOPOLOGY), [f"shares{n}" for n in range(sharers)]
        self.own = {f"own{n}": milli for n, milli in enumerate(owners)}
        self.total = self.whole_sum(extra) if sharers else sum(owners)
        self.memory, self.is_lost = len(owners) + bool(sharers), False
        self.marked: dict[str, bool] = {}
        options = {"policy": "single-numa-node", "scope": "pod"}
        self.of = pod("p", options, total=self.of_pod())
        for name in [*self.sharers[:1], *self.own, *self.sharers[1:]]:
            self.create(name)

    def create(self, name: str) -> None:
        self.world.place(self.of, container(self.of, name, self.size(name)))
        self.marked[name] = self.own.get(name, 0) % 1000 == 0

    def whole_sum(self, extra: int) -> int:
        """A whole number of CPUs: those who share a fraction have no pool."""
        return -(-(sum(self.own.values()) + extra) // 1000) * 1000

    def of_pod(self) -> Resources:
        return resources(self.total / 1000, self.memory)

    def size(self, name: str) -> Resources:
        return resources(self.own[name] / 1000, 1) if name in self.own else self.of_pod()

    def tell(self) -> None:
        """The runtime tells the pod's sum of now."""
        self.world.pods[self.of.id] = self.of = replace(self.of, resources=self.of_pod())

    def step(self, what: str, number: int, milli: int, first: bool) -> None:
        """Do one thing to the pod; its sum is told ``first``, or not at all."""
        name = f"own{number % len(self.own)}"
        if what == "own":
            self.resize(name, milli, first=first)
        elif what == "pod" and self.sharers:
            self.total = self.whole_sum(max(1000, milli))
            if first:
                self.tell()
            for one in self.sharers:
                assert self.world.update(f"p-{one}", self.size(one)) is None
        elif what == "again":
            self.world.stop(f"p-{name}")
            if self.own[name] % 1000 == 0:  # what fractions leave is nobody's whole CPU
                self.check({**self.own, name: 0})
            self.create(name)
        elif what == "away":
            self.world.restart()
        elif what == "lost" and self.is_marked_rightly():
            self.tell()  # a sum that only a container told is lost, too
            self.is_lost = True
            self.world.restart(lost=True)
        self.check(self.own)

    def is_marked_rightly(self) -> bool:
        """True if nobody became an owner, or a sharer, after its creation, which marked it."""
        return all(self.marked[name] == (milli % 1000 == 0) for name, milli in self.own.items())

    def resize(self, name: str, milli: int, *, first: bool) -> None:
        """A resize of one owner; the pod's own sum leaves those who share it one CPU."""
        others = sum(self.own.values()) - self.own[name]
        if not self.sharers:
            self.total = others + milli
        if first:
            self.tell()
        answer = self.world.update(f"p-{name}", resources(milli / 1000, 1))
        if others + milli + (1000 if self.sharers else 0) <= self.total:
            assert answer is None, answer
            self.own[name] = milli
        else:
            assert isinstance(answer, Rejected)

    def check(self, own: dict[str, int]) -> None:
        """Kinds and amounts are those of the sums, in the books and in the cgroups."""
        self.world.check()
        live = {a.container: a for a in self.world.agent.current.state.allocations.values()}
        pool = max(1, (self.total - sum(own.values())) // 1000)
        for name, milli in own.items():
            whole = 0 if milli % 1000 else milli // 1000
            if milli:
                assert len(live[name].cpus) == whole, name
                assert sum(c.cpu_milli for c in live[name].charges.values()) == milli, name
        assert [len(live[name].cpus) for name in self.sharers] == [pool] * len(self.sharers)
        memory = sum(c.memory for c in self.world.agent.current.state.charges.values())
        # Without a checkpoint, what is booked for those who share is read from each one's limit.
        assert memory == self.memory * GIB or not self.sharers or self.is_lost


@given(
    owners=st.lists(SIZES, min_size=1, max_size=3),
    sharers=st.integers(0, 2),
    extra=st.sampled_from([1000, 1500, 3000]),
    done=steps,
)
def test_every_container_has_its_size_and_the_pool_the_rest(
    owners: list[int], sharers: int, extra: int, done: list[tuple[str, int, int, bool]]
) -> None:
    model = Model(owners, sharers, extra)
    model.check(model.own)
    for step in done:
        model.step(*step)
