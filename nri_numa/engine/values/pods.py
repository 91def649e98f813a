"""The pods of a whole node, each made when somebody asks for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from nri_numa.engine.values.workload import PodSandbox


class Pods:
    """The pods that the runtime reports, by sandbox id.

    A container that is known is compared with what is remembered of it, and of its pod nobody asks
    more than the UID. So a pod is made at the first question, and only once.

    Attributes:
        uids: pod UID by sandbox id.
    """

    __slots__ = ("_made", "_make", "uids")

    def __init__(self, uids: Mapping[str, str], make: Callable[[str], PodSandbox]) -> None:
        """Name the pods.

        Args:
            uids: pod UID by sandbox id.
            make: the pod with a sandbox id among these.
        """
        self.uids = uids
        self._make = make
        self._made: dict[str, PodSandbox] = {}

    @classmethod
    def of(cls, pods: Iterable[PodSandbox]) -> Pods:
        """Pods that are made already; of two with one sandbox id the later counts."""
        by_id = {pod.id: pod for pod in pods}
        return cls({pod.id: pod.uid for pod in by_id.values()}, by_id.__getitem__)

    def __getitem__(self, pod_id: str) -> PodSandbox:
        """The pod with a sandbox id.

        Raises:
            KeyError: there is none.
        """
        pod = self._made.get(pod_id)
        if pod is None:
            pod = self._made[pod_id] = self._make(pod_id)
        return pod
