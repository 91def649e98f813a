"""Pods as the API server has them, read into what they ask for, and remembered."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

import msgspec

from nri_numa.engine.request.placed import PLACED
from nri_numa.engine.request.slots import SLOTS
from nri_numa.engine.values.settings import Settings
from nri_numa.scheduler.wish import Member, Wish, wish_of
from nri_numa.simulate.manifests import ManifestError, read_pod
from nri_numa.simulate.pods import PodManifest, Role, container_of, pod_sandbox

_REMEMBERED: Final = 10_000
_TEMPLATES: Final = 512
"""Kinds of pods whose reading is remembered."""
_LARGEST: Final = 16_384
"""Bytes of a pod that is remembered as a kind."""
_OWN: Final = frozenset(
    (
        *("name", "generateName", "uid", "resourceVersion", "generation", "creationTimestamp"),
        *("annotations", "ownerReferences", "managedFields", "selfLink"),
    )
)
"""What differs among the pods of one workload and says nothing of what they ask: metadata."""
_PLACES: Final = frozenset(("volumes", "nodeName", "containers", "initContainers"))
"""Likewise in the spec; of containers see `_MOUNTS`."""
_MOUNTS: Final = "volumeMounts"
"""Of each container: the service account's token has another name in each pod."""


class Reader:
    """Reads pods; filter, prioritize and bind ask about the same one.

    Args:
        settings: prefix, rules, defaults and permissions, as the nodes have them.
        counted: name of the extended resource that counts exclusive CPUs, as the nodes have it.
        claims: containers with ResourceClaims are left to who allocates these, see
            `wish_of_manifest`.
    """

    def __init__(self, settings: Settings, counted: str = "", *, claims: bool = False) -> None:
        self._settings, self._counted, self._claims = settings, counted, claims
        self._known: dict[str, tuple[str, Wish]] = {}
        self._kinds: dict[bytes, Wish] = {}

    def wish(self, document: Mapping[str, Any]) -> Wish:
        """What a pod asks for. A pod that cannot be read asks for nothing, or wrongly."""
        metadata = document.get("metadata")
        if not isinstance(metadata, Mapping):
            metadata = {}
        uid, version = str(metadata.get("uid", "")), str(metadata.get("resourceVersion", ""))
        known = self._known.get(uid)
        if known is not None and version and known[0] == version:
            return known[1]
        wish = self._read(document, metadata)
        if uid:
            if len(self._known) >= _REMEMBERED:
                self._known.clear()
            self._known[uid] = version, wish
        return wish

    def remembered(self, uid: str) -> Wish | None:
        """What was last read of a pod; None where it was not asked about."""
        known = self._known.get(uid)
        return known[1] if known is not None else None

    def forget(self, uid: str) -> None:
        """A pod is bound or gone."""
        self._known.pop(uid, None)

    def _read(self, document: Mapping[str, Any], metadata: Mapping[str, Any]) -> Wish:
        """Read it, or say of it what was found of another pod of the same kind."""
        uid, name = metadata.get("uid"), metadata.get("name")
        kind = _kind(document, metadata, self._settings.prefix)
        if kind is None or not (isinstance(uid, str) and isinstance(name, str) and uid and name):
            return self._anew(document, metadata)
        known = self._kinds.get(kind)
        if known is None:
            known = self._anew(document, metadata)
            if not known.wrong:  # which may name the pod
                if len(self._kinds) >= _TEMPLATES:
                    self._kinds.clear()
                self._kinds[kind] = known
            return known
        return replace(known, uid=uid, name=name)

    def _anew(self, document: Mapping[str, Any], metadata: Mapping[str, Any]) -> Wish:
        try:
            pod = read_pod(document, counted=self._counted)
        except (ManifestError, RecursionError, OverflowError) as error:
            annotations = metadata.get("annotations")
            ours = isinstance(annotations, Mapping) and any(
                self._settings.prefix + "/" in str(name) for name in annotations
            )
            why = str(error)[:300] if ours else ""
            return Wish(
                uid=str(metadata.get("uid", "")),
                namespace=str(metadata.get("namespace", "")),
                name=str(metadata.get("name", "")),
                wrong=why and f"cannot be read: {why}",
                ours=ours,
            )
        return wish_of_manifest(self._settings, pod, claims=self._claims)


def _kind(document: Mapping[str, Any], metadata: Mapping[str, Any], prefix: str) -> bytes | None:
    """What pods of one workload have in common, as a key; None where it is not worth one.

    Everything is in it but annotations of others and what is known to be a pod's own, so that a
    field that is read one day tells pods apart from that day on.
    """
    spec = document.get("spec")
    if not isinstance(spec, Mapping):
        return None
    annotations = metadata.get("annotations") or {}
    if not isinstance(annotations, Mapping) or not {*map(type, annotations.values())} <= {str}:
        return None
    parts: list[object] = [
        {key: value for key, value in metadata.items() if key not in _OWN},
        {key: value for key, value in annotations.items() if prefix in key},
        {key: value for key, value in spec.items() if key not in _PLACES},
    ]
    for section in ("initContainers", "containers"):
        listed = spec.get(section)
        if not isinstance(listed, list):
            parts.append(listed)
            continue
        if not all(isinstance(one, Mapping) for one in listed):
            return None
        parts.append(
            [{key: value for key, value in one.items() if key != _MOUNTS} for one in listed]
        )
    try:
        found = msgspec.msgpack.encode(parts)
    except (TypeError, ValueError, OverflowError, RecursionError):
        return None
    return found if len(found) <= _LARGEST else None


def wish_of_manifest(settings: Settings, pod: PodManifest, *, claims: bool = False) -> Wish:
    """What a pod asks for that was read from a manifest, or from the API server.

    The NUMA nodes of a claim of our DRA driver are chosen, and counted, by the scheduler itself:
    holding others for its container would count it twice, and say where it is not. A pod does not
    tell whose driver its claims are for, so where ours is on every container with one is left out,
    and its node has the last word.

    Args:
        settings: prefix, rules, defaults and permissions, as the nodes have them.
        pod: that was read.
        claims: our DRA driver is on.
    """
    members = [
        Member(
            container=container_of(pod, one, 0, f"{settings.prefix}/{SLOTS}"),
            ends=one.role is Role.INIT,
            memory=one.requests.memory,
        )
        for one in pod.containers
        if not (claims and one.claims)
    ]
    return wish_of(settings, pod_sandbox(pod), members)


def placed_annotation(document: Mapping[str, Any], prefix: str) -> str | None:
    """The value of our annotation on a pod; None where there is none."""
    metadata = document.get("metadata")
    annotations = metadata.get("annotations") if isinstance(metadata, Mapping) else None
    text = annotations.get(f"{prefix}/{PLACED}") if isinstance(annotations, Mapping) else None
    return text if isinstance(text, str) else None
