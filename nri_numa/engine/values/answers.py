"""What the agent answers the runtime, in the engine's own types.

`nri_numa.nri.conversion` turns these into protobuf. An empty text or None means *leave as it is*:
the protocol has no way to take a cpuset back, only to write another one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

import msgspec

from nri_numa.engine.values.memory_policy import MemoryPolicySetting


class ContainerAdjustment(msgspec.Struct, frozen=True, kw_only=True):
    """Changes to the container that is being created.

    Attributes:
        cpus, mems: kernel lists; empty leaves what the request says.
        quota: CFS quota in microseconds per period, `NO_QUOTA` to lift it, None to leave it.
        annotations: added to the container (they end up in the OCI spec only).
        env: added to the environment, in the mapping's order.
        memory_policy: set before the program runs; None sets none.
    """

    cpus: str = ""
    mems: str = ""
    quota: int | None = None
    annotations: Mapping[str, str] = msgspec.field(default_factory=dict)
    env: Mapping[str, str] = msgspec.field(default_factory=dict)
    memory_policy: MemoryPolicySetting | None = None


class ContainerUpdate(NamedTuple):
    """Changes to a container that exists already.

    A tuple, since a changed shared pool makes hundreds of them within one request, each in a
    quarter of the time of a frozen dataclass.

    Attributes:
        container_id: must be set, also when it is the container of an UpdateContainer request.
        cpus, mems: kernel lists; empty leaves them.
        cpu_quota, cpu_period: microseconds; `NO_QUOTA` lifts the quota, None leaves it.
        cpu_shares: cgroup v1 scale, None leaves them.
        memory_limit: bytes, None leaves it.
        ignore_failure: a failure of this one update does not fail the request it rides on.
    """

    container_id: str
    cpus: str = ""
    mems: str = ""
    cpu_quota: int | None = None
    cpu_period: int | None = None
    cpu_shares: int | None = None
    memory_limit: int | None = None
    ignore_failure: bool = False

    @property
    def empty(self) -> bool:
        """Whether it changes nothing at all."""
        return not (
            self.cpus
            or self.mems
            or self.cpu_quota is not None
            or self.cpu_period is not None
            or self.cpu_shares is not None
            or self.memory_limit is not None
        )

    def over(self, earlier: ContainerUpdate) -> ContainerUpdate:
        """Both in one; where both change something, this one counts."""
        return self._replace(
            cpus=self.cpus or earlier.cpus,
            mems=self.mems or earlier.mems,
            cpu_quota=earlier.cpu_quota if self.cpu_quota is None else self.cpu_quota,
            cpu_period=earlier.cpu_period if self.cpu_period is None else self.cpu_period,
            cpu_shares=earlier.cpu_shares if self.cpu_shares is None else self.cpu_shares,
            memory_limit=earlier.memory_limit if self.memory_limit is None else self.memory_limit,
            # One of them being required makes the whole required.
            ignore_failure=earlier.ignore_failure and self.ignore_failure,
        )


NO_ADJUSTMENT: Final = ContainerAdjustment()


class StateChange(msgspec.Struct, frozen=True):
    """What a step may have changed of the state; the store writes what really differs.

    Attributes:
        containers: ids.
        pods: UIDs.
    """

    containers: tuple[str, ...] = ()
    pods: tuple[str, ...] = ()


NO_CHANGE: Final = StateChange()
