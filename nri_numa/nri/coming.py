"""Guaranteed pods that are on this node and of which no container was asked for yet.

Who schedules by a NodeResourceTopology drops what it set aside for pods of a node when the object
names the pods that it counts itself, and it counts none that is still Pending. A pod whose image is
being pulled is charged nowhere: if it were not named either, its CPUs would be promised twice. Its
sandbox runs before images are pulled, so from then on it is named
(docs/adr/0047-one-document-for-schedulers.md).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Final

from nri_numa.engine.values.workload import PodSandbox, QoSClass

PATIENCE: Final = 300.0
"""Seconds for which a pod is named: one whose image cannot be had must not keep its node's numbers
from the scheduler for ever."""


SOON: Final = 0.5
"""Seconds in which the first container follows where its image is there: not worth telling."""


class Coming:
    """Remembers them.

    Args:
        told: called when somebody has no container after `SOON`.
        clock: seconds that only grow.
        later: calls something after so many seconds.
    """

    def __init__(
        self,
        told: Callable[[], object],
        clock: Callable[[], float],
        later: Callable[[float, Callable[[], object]], object],
    ) -> None:
        self._told, self._clock, self._later = told, clock, later
        # By sandbox: since when, namespace, name.
        self._pods: dict[str, tuple[float, str, str]] = {}

    def began(self, pod: PodSandbox) -> None:
        """A sandbox runs."""
        if pod.qos is QoSClass.GUARANTEED:
            self._pods[pod.id] = self._clock(), pod.namespace, pod.name
            self._later(SOON, partial(self._tell, pod.id))

    def _tell(self, sandbox: str) -> None:
        if sandbox in self._pods:
            self._told()

    def over(self, sandbox: str) -> None:
        """A container of it was decided about, or it is stopped."""
        self._pods.pop(sandbox, None)

    def kept(self, sandboxes: Collection[str]) -> None:
        """These are all there are."""
        for sandbox in self._pods.keys() - sandboxes:
            self.over(sandbox)

    def names(self) -> list[tuple[str, str]]:
        """Namespace and name of each; may be asked for in another thread."""
        oldest = self._clock() - PATIENCE
        # A copy in one step: the runtime's requests change it meanwhile.
        return [(space, name) for at, space, name in tuple(self._pods.values()) if at > oldest]
