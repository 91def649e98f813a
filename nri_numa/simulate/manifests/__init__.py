"""Ordinary Kubernetes manifests, read as far as placing their pods needs.

`read_files` turns YAML into `Workload`s, or raises `ManifestError` with every mistake at once;
`nri_numa.simulate.manifests.workloads` turns a pod of them into what a kubelet and a runtime would
tell an NRI plugin about it.
"""

from __future__ import annotations

from nri_numa.simulate.manifests.pods import (
    Amounts,
    ContainerManifest,
    PodManifest,
    Role,
    Workload,
    unmatched,
)
from nri_numa.simulate.manifests.reader import Manifests, read_files, read_text
from nri_numa.simulate.manifests.yaml_documents import ManifestError

__all__ = [
    "Amounts",
    "ContainerManifest",
    "ManifestError",
    "Manifests",
    "PodManifest",
    "Role",
    "Workload",
    "read_files",
    "read_text",
    "unmatched",
]
