"""The container of the shipped DaemonSet, created as the kubelet does it. Free of pytest."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from nri_numa.cri.pb import cri_pb2
from tests.beds.cri import CRI, Pod, poll
from tests.beds.images import AGENT_IMAGE

REPOSITORY = Path(__file__).resolve().parents[2]
MANIFESTS = REPOSITORY / "config/kubernetes"
SECURITY = REPOSITORY / "config/security"


def pod_spec(*components: str) -> dict[str, Any]:
    """The pod of the DaemonSet, with components of kustomize, which patch maps and the container.

    The chart makes the same: `tests/shipped/test_install_manifests.py` compares them.
    """
    document = yaml.safe_load((MANIFESTS / "base/daemonset.yaml").read_text())
    for name in components:
        component = yaml.safe_load((MANIFESTS / name / "kustomization.yaml").read_text())
        (patch,) = component["patches"]
        document = _merged(document, yaml.safe_load(patch["patch"]))
    found: dict[str, Any] = document["spec"]["template"]["spec"]
    return found


def _merged(one: Any, other: Any) -> Any:
    if isinstance(one, dict):
        return one | {k: _merged(one[k], v) if k in one else v for k, v in other.items()}
    if isinstance(one, list) and isinstance(one[0], dict):
        (mine,), (its,) = one, other
        return [_merged(mine, its)]
    return other


class AgentContainer:
    """Runs the container of the pod.

    Args:
        directories: instead of the host's, by name of the volume.
        mounts: of the host, more than the pod has; read-only.

    Attributes:
        seccomp: instead of the profile that the pod asks for.
    """

    def __init__(
        self,
        cri: CRI,
        spec: dict[str, Any],
        directories: Mapping[str, Path],
        *,
        image: str = AGENT_IMAGE,
        command: Sequence[str] = (),
        mounts: Mapping[str, str] = {},
    ) -> None:
        self._cri, self._spec = cri, spec
        self._image, self._command = image, command
        paths = {
            volume["name"]: directories.get(volume["name"])
            or Path(volume.get("hostPath", {"path": "/nowhere"})["path"])
            for volume in spec["volumes"]
        }
        (container,) = spec["containers"]
        self._mounts = [
            cri_pb2.Mount(
                container_path=mount["mountPath"],
                host_path=str(paths[mount["name"]]),
                readonly=mount.get("readOnly", False),
            )
            for mount in container["volumeMounts"]
        ]
        self._mounts += [
            cri_pb2.Mount(container_path=inside, host_path=outside, readonly=True)
            for inside, outside in mounts.items()
        ]
        assert spec["hostNetwork"]
        self.log_file = Path("/dev/null")
        self.seccomp: cri_pb2.SecurityProfile | None = None
        self.pod: Pod = cri.run_pod(
            "nri-numa", namespace="nri-numa", host_pids=spec.get("hostPID", False)
        )

    def run(self, *arguments: str, attempt: int = 0) -> str:
        """Start the container, with other arguments where some are given; returns its id."""
        (spec,) = self._spec["containers"]
        log_path = f"{spec['name']}/{attempt}.log"
        (self.pod.log_directory / spec["name"]).mkdir(exist_ok=True)
        config = cri_pb2.ContainerConfig(
            metadata=cri_pb2.ContainerMetadata(name=spec["name"], attempt=attempt),
            image=cri_pb2.ImageSpec(image=self._image),
            command=self._command,
            args=list(arguments) or spec["args"],
            labels={
                "io.kubernetes.container.name": spec["name"],
                "io.kubernetes.pod.name": self.pod.name,
                "io.kubernetes.pod.namespace": self.pod.namespace,
                "io.kubernetes.pod.uid": self.pod.uid,
            },
            log_path=log_path,
            mounts=self._mounts,
            linux=cri_pb2.LinuxContainerConfig(
                resources=cri_pb2.LinuxContainerResources(
                    cpu_shares=51, memory_limit_in_bytes=256 << 20, oom_score_adj=900
                ),
                security_context=self._security(spec["securityContext"]),
            ),
        )
        answer = self._cri.call(
            "CreateContainer",
            pod_sandbox_id=self.pod.id,
            config=config,
            sandbox_config=self.pod.config,
        )
        container: str = answer.container_id
        self._cri.start(container)
        self.log_file = self.pod.log_directory / log_path
        return container

    def _security(self, asked: dict[str, Any]) -> cri_pb2.LinuxContainerSecurityContext:
        profile = asked["seccompProfile"]
        seccomp = cri_pb2.SecurityProfile(profile_type=cri_pb2.RuntimeDefault)
        if profile["type"] == "Localhost":
            path = str(SECURITY / profile["localhostProfile"])
            seccomp = cri_pb2.SecurityProfile(profile_type=cri_pb2.Localhost, localhost_ref=path)
        return cri_pb2.LinuxContainerSecurityContext(
            namespace_options=self.pod.config.linux.security_context.namespace_options,
            capabilities=cri_pb2.Capability(
                add_capabilities=asked["capabilities"].get("add", []),
                drop_capabilities=asked["capabilities"]["drop"],
            ),
            run_as_user=cri_pb2.Int64Value(value=asked["runAsUser"]),
            run_as_group=cri_pb2.Int64Value(value=asked["runAsGroup"]),
            readonly_rootfs=asked["readOnlyRootFilesystem"],
            no_new_privs=not asked["allowPrivilegeEscalation"],
            privileged=asked["privileged"],
            seccomp=self.seccomp or seccomp,
            masked_paths=["/proc/kcore", "/proc/keys", "/sys/firmware"],
            readonly_paths=["/proc/sys", "/proc/irq", "/proc/bus"],
        )

    def wait(self, container: str) -> int:
        """Wait until it ended; returns its exit status."""
        exited = cri_pb2.CONTAINER_EXITED
        poll(lambda: self._cri.status(container).status.state == exited, f"end of {container}")
        return int(self._cri.status(container).status.exit_code)

    def log(self) -> str:
        """What it has written."""
        return self.log_file.read_text()
