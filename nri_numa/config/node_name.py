"""What this node is called: by the configuration, else as the machine calls itself."""

from __future__ import annotations

import socket

from nri_numa.config.sections import AgentConfig


def node_name(config: AgentConfig) -> str:
    """The node's name for operators, and of the Node object; nothing is decided by it.

    ``nodeName`` wins; in a pod the downward API sets it by the environment
    (``NRI_NUMA_NODE_NAME`` from ``spec.nodeName``). Else it is the host name in lower case, as the
    kubelet registers a node unless it is told otherwise.
    """
    return config.node_name or socket.gethostname().lower()
