"""A ResourceClaim as we take it: its allocation on this node, read as hostile input. Pure.

Source: kubernetes ``resource/v1`` (ResourceClaim) and KEP-5075 (consumedCapacity).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from nri_numa.engine.request import options
from nri_numa.errors import AgentError
from nri_numa.model.workload import CLAIM_VARIABLE_PREFIX
from nri_numa.text import BadQuantity, parse_exact_quantity

MAX_CLAIM_BYTES: Final = 256 << 10
"""Bytes of a claim's document. The API server takes 32 configurations of 10 KiB; ours are short."""
MAX_CLAIM_RESULTS_PER_CONTAINER: Final = 32
MAX_CPUS: Final = 8192
"""NR_CPUS of the largest kernels."""

DRA_DRIVER_CPU_VARIABLE_PREFIX: Final = "DRA_CPUSET_"
"""How the variable begins that dra-driver-cpu sets to the CPUs of a claim; its UID follows."""
CLAIM_NAME_IN_POD_ANNOTATION: Final = "resource.kubernetes.io/pod-claim-name"
"""Annotation of a claim that was made from a template: its name in the pod."""
NUMA_NODE_ATTRIBUTE: Final = "resource.kubernetes.io/numaNode"
"""KEP-6072; standard from Kubernetes 1.37, and an ordinary attribute before."""
CPU_CAPACITY: Final = "cpu"
"""Capacity of a device, below the driver's name: exclusive CPUs."""
MEMORY_CAPACITY: Final = "memory"
HUGEPAGES_CAPACITY_PREFIX: Final = "hugepages"
"""How the names of capacities of huge pages begin, ``hugepages2Mi``: names have no dash there."""

_UID_PATTERN: Final = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_OBJECT_NAME_PATTERN: Final = re.compile(r"[a-z0-9]([-.a-z0-9]*[a-z0-9])?")
_DEVICE_NAME_PATTERN: Final = re.compile(r"numa([0-9]{1,4})")


class InvalidClaim(AgentError):
    """A claim that is not prepared; the message says which, why, and what was expected."""


class ClaimedDevice(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """One device that a claim got.

    Attributes:
        request: name of the request, without that of a subrequest.
        numa_node: whose device it is.
        cpus: exclusive CPUs.
        capacity: everything it takes, by name of the capacity, as whole numbers.
        share_id: id of this share of the device; empty where the API server gives none.
        parameters: annotation keys and their values.
    """

    request: str
    numa_node: int
    cpus: int
    capacity: Mapping[str, int] = msgspec.field(default_factory=dict)
    share_id: str = msgspec.field(name="share", default="")
    parameters: Mapping[str, str] = msgspec.field(default_factory=dict)


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """A claim that is allocated on this node.

    Attributes:
        pod_claim: its name in the pod, where it was made from a template.
        pods: UIDs of the pods that it is reserved for.
        results: those of our driver.
        version: of its record.
    """

    version: int = 1
    uid: str
    namespace: str
    name: str
    pods: frozenset[str]
    results: tuple[ClaimedDevice, ...]
    pod_claim: str = ""

    @property
    def full_name(self) -> str:
        """``namespace/name``."""
        return f"{self.namespace}/{self.name}"


def numa_node_device_name(numa_node: int) -> str:
    """The device of a NUMA node."""
    return f"numa{numa_node}"


def is_uid(text: str) -> bool:
    """Whether it is the UID of an object; it becomes part of file names."""
    return _UID_PATTERN.fullmatch(text) is not None


def prune_claim(document: Mapping[str, Any]) -> dict[str, Any]:
    """The parts of a claim object that `parse_claim` reads."""
    metadata, status = document.get("metadata") or {}, document.get("status") or {}
    made = {
        CLAIM_NAME_IN_POD_ANNOTATION: (metadata.get("annotations") or {}).get(
            CLAIM_NAME_IN_POD_ANNOTATION
        )
    }
    return {
        "metadata": {
            **{key: metadata.get(key) for key in _CLAIM_IDENTITY_KEYS},
            "annotations": made,
        },
        "status": {key: status.get(key) for key in ("allocation", "reservedFor")},
    }


def parse_claim(document: object, *, driver: str, pool: str) -> Claim:
    """Read a claim object of the API server for our driver and this node's pool.

    Raises:
        InvalidClaim: it is not one that can be prepared here.
    """
    top = _require_mapping(document, "the document")
    metadata, status = (_require_mapping(top.get(key), key) for key in ("metadata", "status"))
    uid, namespace, name = (
        _require_text(metadata.get(key), f"metadata.{key}") for key in _CLAIM_IDENTITY_KEYS
    )
    if not is_uid(uid):
        raise InvalidClaim(f"metadata.uid is {uid[:60]!r}, expected the UID of an object")
    who = f"claim {namespace}/{name}"
    if not status.get("allocation"):
        raise InvalidClaim(f"{who} is not allocated, expected status.allocation")
    allocation = _require_mapping(status["allocation"], "status.allocation")
    where = "status.allocation.devices"
    devices = _require_mapping(allocation.get("devices"), where)
    configs = _require_mappings(devices.get("config") or [], f"{where}.config")
    results = [
        _parse_result(who, one, configs, driver, pool)
        for one in _require_mappings(devices.get("results"), f"{where}.results")
        if one.get("driver") == driver
    ]
    if not results:
        raise InvalidClaim(f"{who} has no device of driver {driver}")
    consumers = _require_mappings(status.get("reservedFor") or [], "status.reservedFor")
    return Claim(
        uid=uid,
        namespace=namespace,
        name=name,
        pods=frozenset(
            _require_text(one.get("uid"), "status.reservedFor.uid")
            for one in consumers
            if one.get("resource") == "pods"
        ),
        results=tuple(results),
        pod_claim=str(
            _require_mapping(metadata.get("annotations") or {}, "").get(
                CLAIM_NAME_IN_POD_ANNOTATION
            )
            or ""
        ),
    )


_CLAIM_IDENTITY_KEYS: Final = ("uid", "namespace", "name")


def _parse_result(
    who: str,
    result: Mapping[str, Any],
    configs: Sequence[Mapping[str, Any]],
    driver: str,
    pool: str,
) -> ClaimedDevice:
    name = _require_text(result.get("request"), "request")
    request = name.partition("/")[0]
    try:
        numa_node = _parse_result_numa_node(result, pool)
        capacity = _consumed_capacity(result, driver)
        parameters = dict(_request_parameters({name, request}, configs, driver))
    except InvalidClaim as error:
        raise InvalidClaim(f"{who}, request {request}: {error}") from None
    return ClaimedDevice(
        request=request,
        numa_node=numa_node,
        cpus=capacity[CPU_CAPACITY],
        capacity=capacity,
        share_id=str(result.get("shareID") or "")[:64],
        parameters=parameters,
    )


def _parse_result_numa_node(result: Mapping[str, Any], pool: str) -> int:
    where, device = (_require_text(result.get(key), key) for key in ("pool", "device"))
    if where != pool:
        raise InvalidClaim(
            f"device {device[:80]} is of pool {where[:80]!r}, expected {pool!r}: it is allocated "
            "on another node, or agent and publisher call this one differently; then set nodeName "
            "to the name of the Node for both"
        )
    if result.get("adminAccess"):
        raise InvalidClaim("adminAccess is set, expected none: CPUs are given, not looked at")
    if (found := _DEVICE_NAME_PATTERN.fullmatch(device)) is None:
        raise InvalidClaim(f"device {device[:80]!r}, expected that of a NUMA node, such as numa0")
    return int(found[1])


def _consumed_capacity(result: Mapping[str, Any], driver: str) -> dict[str, int]:
    """What it takes of the device, with 1 or more CPUs."""
    found = {CPU_CAPACITY: 0}
    for key, value in _require_mapping(
        result.get("consumedCapacity") or {}, "consumedCapacity"
    ).items():
        short = str(key).removeprefix(f"{driver}/")
        try:
            amount = parse_exact_quantity(value)
            if amount.denominator != 1:
                raise BadQuantity("a whole number")
        except BadQuantity as error:
            text = f"{short[:80]} is {str(value)[:40]!r}, expected {error}"
            raise InvalidClaim(text) from None
        found[short] = int(amount)
    if not 1 <= found[CPU_CAPACITY] <= MAX_CPUS:
        raise InvalidClaim(
            f"consumes {found[CPU_CAPACITY]} of {driver}/{CPU_CAPACITY}, expected 1 or more "
            "CPUs (does the API "
            "server know consumable capacity, DRAConsumableCapacity?)"
        )
    return found


def _request_parameters(
    request: set[str], configs: Sequence[Mapping[str, Any]], driver: str
) -> Iterator[tuple[str, str]]:
    """Keys and values for a request, by its names; a claim's come after those of its class."""
    for config in sorted(configs, key=lambda one: one.get("source") != "FromClass"):
        names = _require_list(config.get("requests") or [], "config.requests")
        if names and request.isdisjoint(map(str, names)):
            continue
        opaque = _require_mapping(config.get("opaque") or {}, "config.opaque")
        if opaque.get("driver") != driver:
            continue
        for key, value in _require_mapping(opaque.get("parameters"), "parameters").items():
            option = options.TABLE.by_key.get(key)
            expected = f"expected one of {', '.join(options.TABLE.claim_parameters)}"
            if option is None:
                raise InvalidClaim(f"parameter {str(key)[:80]!r} is unknown, {expected}")
            if why := option.claim_obstacle:
                raise InvalidClaim(
                    f"parameter {key!r} is not for claims, because {why}; {expected}"
                )
            if not isinstance(value, str) or len(value) > 256:
                shown = str(value)[:80]
                raise InvalidClaim(
                    f"parameter {key} is {shown!r}, expected a text as in the annotation"
                )
            yield key, value


# --- records ----------------------------------------------------------------------------------


def encode_record(claim: Claim) -> str:
    """A claim as its record has it."""
    return msgspec.json.encode(claim, order="sorted").decode()


def decode_record(text: str) -> Claim:
    """Read what `encode_record` made.

    Raises:
        InvalidClaim: it is something else, or of a newer version.
    """
    try:
        claim = msgspec.json.decode(text, type=Claim)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise InvalidClaim(f"no record of a claim: {error!r}") from None
    if claim.version != 1:
        raise InvalidClaim(f"a record of version {claim.version}, expected 1")
    return claim


# --- CDI --------------------------------------------------------------------------------------

_CLAIM_VARIABLE_PATTERN: Final = re.compile(
    rf"{CLAIM_VARIABLE_PREFIX}([0-9]{{1,2}})_([0-9A-F]{{8}}(?:_[0-9A-F]{{4}}){{3}}_[0-9A-F]{{12}})"
)


def cdi_kind(driver: str) -> str:
    """Vendor and class of our CDI devices."""
    return f"{driver}/claim"


def qualified_cdi_device_name(driver: str, uid: str, number: int) -> str:
    """The CDI device of a claim's result."""
    return f"{cdi_kind(driver)}={_unqualified_cdi_device_name(uid, number)}"


def _unqualified_cdi_device_name(uid: str, number: int) -> str:
    # Before CDI 0.5.0 a name may not begin with a digit.
    return f"claim-{uid}-{number}"


def cdi_document(driver: str, claim: Claim) -> str:
    """The CDI file of a claim: each result is a variable. 0.3.0 is the first version with these."""
    return json.dumps(
        {
            "cdiVersion": "0.3.0",
            "kind": cdi_kind(driver),
            "devices": [
                {
                    "name": _unqualified_cdi_device_name(claim.uid, number),
                    "containerEdits": {
                        "env": [f"{claim_variable_name(claim.uid, number)}={one.request}"]
                    },
                }
                for number, one in enumerate(claim.results)
            ],
        },
        separators=(",", ":"),
    )


# --- Device metadata (KEP-5304): files by which containers find what they have of claims ---


def metadata_path(driver: str, claim: Claim, request: str) -> str:
    """Where a container finds the file of a request; empty where a name is none."""
    kind, name = "resourceclaims", claim.name
    if claim.pod_claim:
        kind, name = "resourceclaimtemplates", claim.pod_claim
    if not (_OBJECT_NAME_PATTERN.fullmatch(name) and _OBJECT_NAME_PATTERN.fullmatch(request)):
        return ""
    directory = f"/var/run/kubernetes.io/dra-device-attributes/{kind}/{name}/{request}"
    return f"{directory}/{driver}-metadata.json"


def metadata_document(
    driver: str, pool: str, claim: Claim, one: ClaimedDevice, cpus: Iterable[int], generation: int
) -> str:
    """The file: the NUMA node, and each CPU under the name that dra-driver-cpu gives its number."""
    numa = {NUMA_NODE_ATTRIBUTE: {"int": one.numa_node}}
    devices: list[dict[str, Any]] = [
        {"name": numa_node_device_name(one.numa_node), "attributes": numa}
    ]
    devices += (
        {"name": f"cpu{cpu}", "attributes": {**numa, "dra.cpu/cpuID": {"int": cpu}}} for cpu in cpus
    )
    same = {
        "kind": "DeviceMetadata",
        "metadata": {
            "name": claim.name,
            "namespace": claim.namespace,
            "uid": claim.uid,
            "generation": generation,
        },
        **({"podClaimName": claim.pod_claim} if claim.pod_claim else {}),
        "requests": [
            {
                "name": one.request,
                "devices": [{"driver": driver, "pool": pool, **device} for device in devices],
            }
        ],
    }
    # Readers take the first version that they know.
    versions = (f"metadata.resource.k8s.io/{version}" for version in ("v1beta1", "v1alpha1"))
    return "".join(f"{json.dumps({'apiVersion': version, **same})}\n" for version in versions)


def claim_variable_name(uid: str, number: int) -> str:
    """Name of the variable of a claim's result."""
    return f"{CLAIM_VARIABLE_PREFIX}{number}_{uid.upper().replace('-', '_')}"


def parse_claim_variable_names(variables: Sequence[str]) -> list[tuple[str, int]]:
    """UID and number of the results that names of variables stand for, each once."""
    found: dict[tuple[str, int], None] = {}
    for name in variables:
        match = _CLAIM_VARIABLE_PATTERN.fullmatch(name)
        if match is not None and len(found) < MAX_CLAIM_RESULTS_PER_CONTAINER:
            found[match[2].lower().replace("_", "-"), int(match[1])] = None
    return list(found)


# --- reading ----------------------------------------------------------------------------------


def _require_mapping(value: object, what: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise InvalidClaim(f"{what} is {str(value)[:40]!r}, expected a mapping")
    return value


def _require_list(value: object, what: str) -> list[Any]:
    if not isinstance(value, list) or len(value) > 256:
        raise InvalidClaim(f"{what} is {str(value)[:40]!r}, expected a list")
    return value


def _require_mappings(value: object, what: str) -> list[Mapping[str, Any]]:
    return [_require_mapping(one, what) for one in _require_list(value, what)]


def _require_text(value: object, what: str) -> str:
    if not isinstance(value, str) or not value or len(value) > 253:
        raise InvalidClaim(f"{what} is {str(value)[:40]!r}, expected a text")
    return value
