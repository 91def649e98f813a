"""Who may ask for what: the operator's permissions, applied to one pod's annotations.

What NRI shows of a pod is its namespace, labels, annotations and QoS class, and nothing of who
created it or of its service account. Rules and defaults of the operator need no permission.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from nri_numa.engine.values.limits import ANY_KEY, BUILT_IN, Permission
from nri_numa.engine.values.workload import PodSandbox, Requested
from nri_numa.machine.cpuset import CPUSet, ListFormatError, NUMASet

_LISTS: dict[str, type[CPUSet | NUMASet]] = {"numacpu": CPUSet, "numamem": NUMASet}


def permission_of(permissions: Sequence[Permission], pod: PodSandbox) -> Permission:
    """The first permission that matches, else the built-in one."""
    for permission in permissions:
        if _matches(permission, pod):
            return permission
    return BUILT_IN


def _matches(permission: Permission, pod: PodSandbox) -> bool:
    """Every condition that is not empty must hold."""
    return (
        (not permission.qos or pod.qos in permission.qos)
        and all(pod.labels.get(key) == value for key, value in permission.labels.items())
        and (
            not permission.namespaces
            or any(fnmatchcase(pod.namespace, p) for p in permission.namespaces)
        )
    )


def barred(permission: Permission, key: str, value: str) -> str | None:
    """What was expected where a key or its value is not permitted; None where it is.

    A value that cannot be read is left to whoever checks its form.
    """
    if ANY_KEY not in permission.keys and key not in permission.keys:
        keys = ", ".join(permission.keys)
        return f"one of the keys {keys}" if keys else "no annotation of ours"
    allowed = permission.values.get(key)
    if allowed is None or value in allowed:
        return None
    kind = _LISTS.get(key)
    if kind is None:
        return f"one of {', '.join(allowed)}"
    try:
        # What is allowed was checked when the configuration was read.
        if not kind.parse(value).bits & ~kind.parse(",".join(allowed)).bits:
            return None
    except ListFormatError:
        return None
    return f"no others than {','.join(allowed)}"


def asked_by_pod(requested: Requested, key: str) -> bool:
    """Say whether a key's value comes from an annotation, not from the operator."""
    return requested.sources.get(key, "").startswith("annotation ")
