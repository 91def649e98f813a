"""What the agent keeps of containers that were refused, and how kept traces are read again."""

from __future__ import annotations

import msgspec

from nri_numa.engine.decision import Refused
from nri_numa.engine.explain.explanation import Grounds
from nri_numa.engine.state import Allocation
from nri_numa.machine.model import Topology
from nri_numa.observe.traces import KeptTrace, unpack


class RefusedContainer(msgspec.Struct, frozen=True, kw_only=True):
    """A refused container, kept as long as its pod so that the pod's author can ask why.

    Attributes:
        at: Unix time in seconds of the last refusal.
        count: how often it was refused for this reason: the kubelet tries again and again.
    """

    pod_id: str
    namespace: str
    pod: str
    container: str
    reason: str
    message: str
    at: float
    trace: KeptTrace
    observed: bool = False
    count: int = 1

    @classmethod
    def of(
        cls, decision: Refused, *, at: float, trace: KeptTrace, observed: bool
    ) -> RefusedContainer:
        """What is kept of a decision.

        Args:
            decision: the refusal.
            at: Unix time in seconds.
            trace: how it came about, made small.
            observed: nothing was done about it.
        """
        return cls(
            pod_id=decision.trace.pod.id,
            namespace=decision.trace.pod.namespace,
            pod=decision.trace.pod.name,
            container=decision.trace.container.name,
            reason=decision.reason,
            message=decision.message,
            at=at,
            trace=trace,
            observed=observed,
        )

    @property
    def key(self) -> tuple[str, str, str, str]:
        """The same for all refusals of a container for one reason."""
        return self.namespace, self.pod, self.container, self.reason

    def tells_of(self, decision: Refused) -> bool:
        """Whether this is the same refusal of the same container."""
        trace = decision.trace
        return (self.namespace, self.pod, self.container, self.message) == (
            trace.pod.namespace,
            trace.pod.name,
            trace.container.name,
            decision.message,
        )


def unpacked(trace: KeptTrace, whose: Allocation | RefusedContainer, topology: Topology) -> Grounds:
    """The grounds of a decision whose trace was kept."""
    return unpack(
        trace,
        namespace=whose.namespace,
        pod=whose.pod,
        container=whose.container,
        distance=topology.distance,
    )
