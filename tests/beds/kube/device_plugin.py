"""``nri-numa device-plugin`` beside a bed's node, as in its DaemonSet."""

import sys
from collections.abc import Mapping

from tests.beds.kube.node import KubeNode
from tests.beds.plugin_process import plugin_environment
from tests.beds.processes import Daemon

RESOURCE = "offered.example.com/exclusive-cpu"
"""Not the default, which the publisher writes in other tests: the kubelet keeps the count of a
resource at 0 for five minutes after its device plugin has gone."""


class DevicePluginDaemon(Daemon):
    """The process: the bed's ``/var/lib/kubelet``, the host's network, where the agent answers."""

    def __init__(
        self,
        node: KubeNode,
        name: str = "device-plugin",
        *,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        command = [
            *node.control.namespaces.enter(network=False),
            sys.executable, "-m", "nri_numa", "device-plugin",
            f"--config={node.plugin.config_file}",
            f"--api={node.plugin.address}",
        ]  # fmt: skip
        named = {"NRI_NUMA_DEVICE_PLUGIN_RESOURCE_NAME": RESOURCE, **(environment or {})}
        super().__init__(name, command, node.control.log_directory, plugin_environment(named))

    def registrations(self) -> int:
        """How often the kubelet took it, over all its lives."""
        return len(self.records("resource registered"))
