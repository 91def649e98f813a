"""Ordinary Kubernetes manifests, read as far as placing their pods needs.

`read_files` turns YAML into `Workload`s, or raises `ManifestError` with every mistake at once;
`nri_numa.manifests.kubelet` turns a pod of them into what a kubelet and a runtime would tell an
NRI plugin about it.
"""

from __future__ import annotations

from nri_numa.manifests.documents import ManifestError
from nri_numa.manifests.model import (
    Amounts,
    ContainerManifest,
    PodManifest,
    Role,
    Workload,
)
from nri_numa.manifests.reader import Manifests, read_files, read_text

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
]
