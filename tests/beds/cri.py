"""A synchronous CRI client for tests: it plays the kubelet.

Pods share the host's network unless asked otherwise, so that no CNI is needed. Cgroup parents,
shares, quota and OOM scores are what the kubelet with the cgroupfs driver would send for the given
requests and limits.
"""

import enum
import json
import re
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self, TypeVar

import grpc

from nri_numa.cri.pb import cri_pb2
from nri_numa.model.cpuset import CPUSet
from tests.beds.images import FIRST_LINE_COMMAND, IMAGE

_OPTIONS = [
    ("grpc.default_authority", "localhost"),
    ("grpc.enable_http_proxy", 0),
    # A daemon that is restarted answers within milliseconds; do not wait the default second.
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 200),
    # Each client a connection of its own, so that closing one bed does not disturb another.
    ("grpc.use_local_subchannel_pool", 1),
]
_T = TypeVar("_T")


class CRIError(RuntimeError):
    """The runtime refused a call."""

    def __init__(self, method: str, code: grpc.StatusCode, message: str) -> None:
        self.method = method
        self.code = code
        self.message = message
        super().__init__(f"{method}: {code.name}: {message}")


class QoS(enum.Enum):
    """QoS class of a pod; the value is its part of the cgroup path."""

    GUARANTEED = ""
    BURSTABLE = "burstable"
    BEST_EFFORT = "besteffort"


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """Linux resources in CRI's terms; 0 and the empty string mean "not set"."""

    shares: int = 0
    quota: int = 0
    period: int = 0
    memory: int = 0
    oom_score_adj: int = 0
    cpus: str = ""
    mems: str = ""
    hugepages: Mapping[str, int] = field(default_factory=dict)

    def message(self) -> cri_pb2.LinuxContainerResources:
        return cri_pb2.LinuxContainerResources(
            cpu_shares=self.shares,
            cpu_quota=self.quota,
            cpu_period=self.period,
            memory_limit_in_bytes=self.memory,
            oom_score_adj=self.oom_score_adj,
            cpuset_cpus=self.cpus,
            cpuset_mems=self.mems,
            hugepage_limits=[
                cri_pb2.HugepageLimit(page_size=size, limit=limit)
                for size, limit in self.hugepages.items()
            ],
        )


MIB = 1024 * 1024
PREFIX = "numa.kubernetes.io"


def asks(**keys: str) -> dict[str, str]:
    """Annotations; ``on_failure`` means ``on-failure`` and ``numacpu__web`` ``numacpu.web``."""
    return {
        f"{PREFIX}/{key.replace('__', '.').replace('_', '-')}": text for key, text in keys.items()
    }


def guaranteed(cpus: float, memory: int = 64 * MIB) -> Resources:
    """Requests equal limits: what the kubelet makes of ``cpu: <cpus>, memory: <memory>``."""
    milli = round(cpus * 1000)
    return Resources(
        shares=max(2, milli * 1024 // 1000),
        quota=milli * 100,
        period=100_000,
        memory=memory,
        oom_score_adj=-997,
    )


def burstable(cpu_request: float, *, memory_limit: int = 0) -> Resources:
    """A request without a limit of CPUs."""
    return Resources(
        shares=max(2, round(cpu_request * 1000) * 1024 // 1000),
        memory=memory_limit,
        oom_score_adj=900,
    )


BEST_EFFORT = Resources(shares=2, oom_score_adj=1000)


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """CPUs and memory nodes a process may use, in kernel list format."""

    cpus: str
    mems: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Pod:
    """A pod sandbox that runs."""

    id: str
    name: str
    namespace: str
    uid: str
    cgroup_parent: str
    log_directory: Path
    config: cri_pb2.PodSandboxConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Container:
    """A container that was created."""

    id: str
    name: str
    pod: Pod
    log_file: Path


def poll(
    probe: Callable[[], _T | None], what: str, timeout_s: float = 180.0, *, every_s: float = 0.2
) -> _T:
    """Ask until the answer is true, more slowly each time; the limit only bounds a failure."""
    deadline = time.monotonic() + timeout_s
    pause = 0.02
    while not (answer := probe()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: nothing after {timeout_s:g} s")
        pause = min(pause * 1.3, every_s)
        time.sleep(pause)
    return answer


def allowed(pid: int | str) -> Seen:
    text = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace")
    found = dict(re.findall(r"^(Cpus|Mems)_allowed_list:\s*(\S*)$", text, re.MULTILINE))
    return Seen(cpus=found["Cpus"], mems=found["Mems"])


class CRI:
    """Calls one runtime; usable as a context manager."""

    def __init__(
        self,
        socket: Path,
        log_root: Path,
        *,
        on_cgroup: Callable[[str], None] | None = None,
        timeout_s: float = 180.0,
        cgroup_root: str = "/kubepods",
        slices: bool = False,
    ) -> None:
        self.socket = socket
        self._log_root = log_root
        self._on_cgroup = on_cgroup
        self._timeout_s = timeout_s
        self.cgroup_root = cgroup_root
        self._slices = slices
        self._channel = grpc.insecure_channel(f"unix://{socket}", options=_OPTIONS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._channel.close()

    def call(self, method: str, service: str = "Runtime", **fields: Any) -> Any:
        request = getattr(cri_pb2, f"{method}Request")(**fields)
        multi_callable = self._channel.unary_unary(
            f"/runtime.v1.{service}Service/{method}",
            request_serializer=type(request).SerializeToString,
            response_deserializer=getattr(cri_pb2, f"{method}Response").FromString,
        )
        try:
            # wait_for_ready: a runtime that restarts is not there for a moment.
            return multi_callable(request, timeout=self._timeout_s, wait_for_ready=True)
        except grpc.RpcError as error:
            raise CRIError(method, error.code(), error.details() or "") from None

    # -- the runtime -----------------------------------------------------------------------

    def version(self) -> str:
        """``containerd 2.1.9``."""
        answer = self.call("Version")
        return f"{answer.runtime_name} {answer.runtime_version}"

    def ready(self) -> bool:
        """Whether the runtime says that it can run containers (the network does not matter)."""
        conditions = self.call("Status").status.conditions
        return any(each.type == "RuntimeReady" and each.status for each in conditions)

    def images(self) -> list[str]:
        images = self.call("ListImages", "Image").images
        return sorted(tag for image in images for tag in image.repo_tags)

    # -- pods ------------------------------------------------------------------------------

    def run_pod(
        self,
        name: str = "pod",
        *,
        namespace: str = "default",
        annotations: Mapping[str, str] | None = None,
        qos: QoS = QoS.GUARANTEED,
        own_network: bool = False,
        host_pids: bool = False,
    ) -> Pod:
        """RunPodSandbox; the kubelet's own annotations are added."""
        uid = str(uuid.uuid4())
        parts = [part for part in (self.cgroup_root, qos.value, f"pod{uid}") if part]
        parent = "/".join(parts)
        if self._slices:
            # "kubepods-burstable-podUID.slice" in that of its class: systemd.slice(5)
            names = [part.strip("/").replace("-", "_") for part in parts]
            parent = "".join(f"/{'-'.join(names[: i + 1])}.slice" for i in range(len(names)))
        log_directory = self._log_root / f"{namespace}_{name}_{uid}"
        log_directory.mkdir(parents=True)
        config = cri_pb2.PodSandboxConfig(
            metadata=cri_pb2.PodSandboxMetadata(name=name, uid=uid, namespace=namespace),
            # No hostname: in the host's network a pod shares the host's name too.
            log_directory=str(log_directory),
            labels={
                "io.kubernetes.pod.name": name,
                "io.kubernetes.pod.namespace": namespace,
                "io.kubernetes.pod.uid": uid,
            },
            annotations={
                **(annotations or {}),
                "kubernetes.io/config.seen": "1970-01-01T00:00:00Z",
                "kubernetes.io/config.source": "api",
            },
            linux=cri_pb2.LinuxPodSandboxConfig(
                cgroup_parent=parent,
                security_context=cri_pb2.LinuxSandboxSecurityContext(
                    namespace_options=cri_pb2.NamespaceOption(
                        network=cri_pb2.POD if own_network else cri_pb2.NODE,
                        pid=cri_pb2.NODE if host_pids else cri_pb2.POD,
                    )
                ),
            ),
        )
        if self._on_cgroup is not None:
            self._on_cgroup(parent)
        return Pod(
            id=self.call("RunPodSandbox", config=config).pod_sandbox_id,
            name=name,
            namespace=namespace,
            uid=uid,
            cgroup_parent=parent,
            log_directory=log_directory,
            config=config,
        )

    def stop_pod(self, pod: Pod | str) -> None:
        """StopPodSandbox: stops its containers too."""
        self.call("StopPodSandbox", pod_sandbox_id=_id(pod))

    def remove_pod(self, pod: Pod | str, *, stop: bool = True) -> None:
        """Remove a pod with its containers; stopped before, or by force."""
        if stop:
            self.stop_pod(pod)
        self.call("RemovePodSandbox", pod_sandbox_id=_id(pod))

    def pods(self) -> list[cri_pb2.PodSandbox]:
        return list(self.call("ListPodSandbox").items)

    def remove_all(self) -> None:
        """Stop and remove every container at once (timeout 0), then every pod."""
        with ThreadPoolExecutor(max_workers=8) as pool:
            list(pool.map(self.stop, [container.id for container in self.containers()]))
            list(pool.map(self.remove_pod, [pod.id for pod in self.pods()]))

    # -- containers ------------------------------------------------------------------------

    def create(
        self,
        pod: Pod,
        name: str = "main",
        *,
        resources: Resources = BEST_EFFORT,
        command: Sequence[str] = FIRST_LINE_COMMAND,
        annotations: Mapping[str, str] | None = None,
        env: Mapping[str, str] | None = None,
        attempt: int = 0,
        mounts: Mapping[str, str] | None = None,
        devices: Sequence[str] = (),
        user: int = 0,
    ) -> Container:
        """CreateContainer; NRI plugins decide now, the cgroup comes with `start`.

        `mounts` are paths of the host by path in the container, bound read-only.
        """
        log_path = f"{name}/{attempt}.log"
        (pod.log_directory / name).mkdir(exist_ok=True)
        config = cri_pb2.ContainerConfig(
            metadata=cri_pb2.ContainerMetadata(name=name, attempt=attempt),
            image=cri_pb2.ImageSpec(image=IMAGE),
            command=list(command),
            envs=[cri_pb2.KeyValue(key=key, value=value) for key, value in (env or {}).items()],
            mounts=[
                cri_pb2.Mount(container_path=inside, host_path=outside, readonly=True)
                for inside, outside in (mounts or {}).items()
            ],
            labels={
                "io.kubernetes.container.name": name,
                "io.kubernetes.pod.name": pod.name,
                "io.kubernetes.pod.namespace": pod.namespace,
                "io.kubernetes.pod.uid": pod.uid,
            },
            annotations={"io.kubernetes.container.restartCount": str(attempt)}
            | dict(annotations or {}),
            log_path=log_path,
            devices=[
                cri_pb2.Device(host_path=path, container_path=path, permissions="rw")
                for path in devices
            ],
            linux=cri_pb2.LinuxContainerConfig(
                resources=resources.message(),
                security_context=cri_pb2.LinuxContainerSecurityContext(
                    namespace_options=pod.config.linux.security_context.namespace_options,
                    run_as_user=cri_pb2.Int64Value(value=user),
                ),
            ),
        )
        answer = self.call(
            "CreateContainer", pod_sandbox_id=pod.id, config=config, sandbox_config=pod.config
        )
        return Container(
            id=answer.container_id, name=name, pod=pod, log_file=pod.log_directory / log_path
        )

    def start(self, container: Container | str) -> None:
        self.call("StartContainer", container_id=_id(container))

    def run(self, pod: Pod, name: str = "main", **more: Any) -> Container:
        container = self.create(pod, name, **more)
        self.start(container)
        return container

    def pod(
        self, name: str, *, limit: float = 0, namespace: str = "default", **keys: str
    ) -> Container:
        """Run a pod with one container: Guaranteed with a limit of CPUs, else BestEffort.

        `keys`: what it asks for, as in `asks`.
        """
        pod = self.run_pod(name, namespace=namespace, annotations=asks(**keys))
        return self.run(pod, resources=guaranteed(limit) if limit else BEST_EFFORT)

    def owner(self, name: str = "owner", cpus: int = 1) -> Container:
        return self.pod(name, limit=cpus, cpus="exclusive")

    def stop(self, container: Container | str, *, timeout_s: int = 0) -> None:
        """StopContainer; with the timeout 0 it is killed at once."""
        self.call("StopContainer", container_id=_id(container), timeout=timeout_s)

    def remove(self, container: Container | str, *, stop: bool = True) -> None:
        """Remove a container; stopped before, or by force."""
        if stop:
            self.stop(container)
        self.call("RemoveContainer", container_id=_id(container))

    def update(self, container: Container | str, resources: Resources) -> None:
        """UpdateContainerResources; fields that are not set keep what they were."""
        linux = resources.message()
        self.call("UpdateContainerResources", container_id=_id(container), linux=linux)

    def containers(self, *, running: bool = False) -> list[cri_pb2.Container]:
        state = cri_pb2.ContainerStateValue(state=cri_pb2.CONTAINER_RUNNING)
        wanted = cri_pb2.ContainerFilter(state=state) if running else None
        return list(self.call("ListContainers", filter=wanted).containers)

    # -- what became of a container --------------------------------------------------------

    def status(self, container: Container | str) -> cri_pb2.ContainerStatusResponse:
        answer: cri_pb2.ContainerStatusResponse = self.call(
            "ContainerStatus", container_id=_id(container), verbose=True
        )
        return answer

    def info(self, container: Container | str) -> dict[str, Any]:
        """The runtime's own notes on a container, with ``pid`` and ``runtimeSpec``."""
        document = json.loads(self.status(container).info["info"])
        assert isinstance(document, dict)
        return document

    def pid(self, container: Container | str) -> int:
        return int(self.info(container)["pid"])

    def running(self, container: Container | str) -> bool:
        return self.status(container).status.state == cri_pb2.CONTAINER_RUNNING

    def allowed(self, container: Container | str) -> Seen:
        """What the kernel says the first process may use, now."""
        return allowed(self.pid(container))

    def cpus(self, container: Container | str) -> CPUSet:
        return CPUSet.parse(self.allowed(container).cpus)

    def settles(self, container: Container, cpus: CPUSet) -> None:
        """Wait until a container may use exactly these CPUs."""
        poll(lambda: self.cpus(container) == cpus, f"{container.pod.name} on CPUs {cpus}")

    def spec_annotations(self, container: Container | str) -> dict[str, str]:
        """Annotations of the OCI spec, where NRI plugins leave theirs."""
        annotations = self.info(container)["runtimeSpec"].get("annotations") or {}
        return {str(key): str(value) for key, value in annotations.items()}

    def logs(self, container: Container) -> list[str]:
        """Whole lines printed so far, without the CRI prefix (time, stream, tag)."""
        try:
            text = container.log_file.read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return []
        lines = text.split("\n")[:-1]
        return [line.split(" ", 3)[3] for line in lines if line.count(" ") >= 3]

    def first_line(self, container: Container) -> Seen:
        """What the container's process saw of itself before it did anything else."""
        line = poll(
            lambda: next(iter(self.logs(container)), None), f"first line of {container.name}"
        )
        match = re.match(r"cpus=(\S*) mems=(\S*)", line)
        assert match is not None, f"first line of {container.name} is {line!r}"
        return Seen(cpus=match.group(1), mems=match.group(2))


def _id(thing: Pod | Container | str) -> str:
    return thing if isinstance(thing, str) else thing.id


def with_cpus(resources: Resources, cpus: str, mems: str = "") -> Resources:
    """The same with a cpuset, as the kubelet's static policy would send it."""
    return replace(resources, cpus=cpus, mems=mems)
