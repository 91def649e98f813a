"""ResourceClaims with their allocation on this node, read as hostile input. Pure.

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
from nri_numa.model.cpuset import CPUSet
from nri_numa.model.workload import CLAIM_VARIABLE_PREFIX
from nri_numa.text import BadQuantity, parse_exact_quantity

MAX_CLAIM_BYTES: Final = 256 << 10
"""Bytes of a claim's document. The API server allows 32 configurations of 10 KiB."""
MAX_CLAIM_RESULTS_PER_CONTAINER: Final = 32

DRA_DRIVER_CPU_VARIABLE_PREFIX: Final = "DRA_CPUSET_"
"""Prefix of dra-driver-cpu's variable with the CPUs of a claim; the claim's UID follows."""
CLAIM_NAME_IN_POD_ANNOTATION: Final = "resource.kubernetes.io/pod-claim-name"
"""Annotation with the pod's name for a claim that was made from a template."""
NUMA_NODE_ATTRIBUTE: Final = "resource.kubernetes.io/numaNode"
"""KEP-6072; standard since Kubernetes 1.37, an ordinary attribute before."""
CPU_CAPACITY: Final = "cpu"
"""Capacity of a device, below the driver's name: exclusive CPUs."""
MEMORY_CAPACITY: Final = "memory"
HUGEPAGES_CAPACITY_PREFIX: Final = "hugepages"
"""Prefix of huge page capacities such as ``hugepages2Mi``: capacity names have no dash."""

_UID_PATTERN: Final = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_OBJECT_NAME_PATTERN: Final = re.compile(r"[a-z0-9]([-.a-z0-9]*[a-z0-9])?")
_DEVICE_NAME_PATTERN: Final = re.compile(r"numa([0-9]{1,4})")


class InvalidClaim(AgentError):
    """A claim that cannot be prepared; the message names it, the problem and what was expected."""


class ClaimedDevice(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """One device that is allocated to a claim.

    Attributes:
        request: name of the request, without the subrequest.
        numa_node: NUMA node that the device stands for.
        cpus: exclusive CPUs.
        capacity: consumed amounts by name of the capacity, whole numbers.
        share_id: id of this share of the device; empty if the API server sets none.
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
        pod_claim: its name in the pod, if it was made from a template.
        pods: UIDs of the pods that it is reserved for.
        results: devices of this driver.
        version: format of the record.
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
    """Name of the device of a NUMA node."""
    return f"numa{numa_node}"


def is_uid(text: str) -> bool:
    """True if the text is an object's UID, which may become part of file names."""
    return _UID_PATTERN.fullmatch(text) is not None


def prune_claim(document: Mapping[str, Any]) -> dict[str, Any]:
    """Keep the parts of a claim object that `parse_claim` reads."""
    metadata, status = document.get("metadata") or {}, document.get("status") or {}
    annotations = {
        CLAIM_NAME_IN_POD_ANNOTATION: (metadata.get("annotations") or {}).get(
            CLAIM_NAME_IN_POD_ANNOTATION
        )
    }
    return {
        "metadata": {
            **{key: metadata.get(key) for key in _CLAIM_IDENTITY_KEYS},
            "annotations": annotations,
        },
        "status": {key: status.get(key) for key in ("allocation", "reservedFor")},
    }


def parse_claim(document: object, *, driver: str, pool: str) -> Claim:
    """Parse a claim object for this driver and pool; `InvalidClaim` if it cannot be prepared."""
    top = _require_mapping(document, "the document")
    metadata, status = (_require_mapping(top.get(key), key) for key in ("metadata", "status"))
    uid, namespace, name = (
        _require_text(metadata.get(key), f"metadata.{key}") for key in _CLAIM_IDENTITY_KEYS
    )
    if not is_uid(uid):
        raise InvalidClaim(f"metadata.uid is {uid[:60]!r}, expected the UID of an object")
    subject = f"claim {namespace}/{name}"
    if not status.get("allocation"):
        raise InvalidClaim(f"{subject} is not allocated, expected status.allocation")
    allocation = _require_mapping(status["allocation"], "status.allocation")
    path = "status.allocation.devices"
    devices = _require_mapping(allocation.get("devices"), path)
    configs = _require_mappings(devices.get("config") or [], f"{path}.config")
    results = [
        _parse_result(subject, entry, configs, driver, pool)
        for entry in _require_mappings(devices.get("results"), f"{path}.results")
        if entry.get("driver") == driver
    ]
    if not results:
        raise InvalidClaim(f"{subject} has no device of driver {driver}")
    annotations = _require_mapping(metadata.get("annotations") or {}, "")
    consumers = _require_mappings(status.get("reservedFor") or [], "status.reservedFor")
    return Claim(
        uid=uid,
        namespace=namespace,
        name=name,
        pods=frozenset(
            _require_text(entry.get("uid"), "status.reservedFor.uid")
            for entry in consumers
            if entry.get("resource") == "pods"
        ),
        results=tuple(results),
        pod_claim=str(annotations.get(CLAIM_NAME_IN_POD_ANNOTATION) or ""),
    )


_CLAIM_IDENTITY_KEYS: Final = ("uid", "namespace", "name")


def _parse_result(
    subject: str,
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
        raise InvalidClaim(f"{subject}, request {request}: {error}") from None
    return ClaimedDevice(
        request=request,
        numa_node=numa_node,
        cpus=capacity[CPU_CAPACITY],
        capacity=capacity,
        share_id=str(result.get("shareID") or "")[:64],
        parameters=parameters,
    )


def _parse_result_numa_node(result: Mapping[str, Any], pool: str) -> int:
    origin, device = (_require_text(result.get(key), key) for key in ("pool", "device"))
    if origin != pool:
        raise InvalidClaim(
            f"device {device[:80]} is of pool {origin[:80]!r}, expected {pool!r}: it is allocated "
            "on another node, or agent and publisher call this one differently; then set nodeName "
            "to the name of the Node for both"
        )
    if result.get("adminAccess"):
        raise InvalidClaim("adminAccess is set, expected none: CPUs have no admin access")
    if (match := _DEVICE_NAME_PATTERN.fullmatch(device)) is None:
        raise InvalidClaim(f"device {device[:80]!r}, expected that of a NUMA node, such as numa0")
    return int(match[1])


def _consumed_capacity(result: Mapping[str, Any], driver: str) -> dict[str, int]:
    """Parse the consumed capacity of a result, with 1 or more CPUs."""
    capacity = {CPU_CAPACITY: 0}
    consumed = _require_mapping(result.get("consumedCapacity") or {}, "consumedCapacity")
    for key, value in consumed.items():
        name = str(key).removeprefix(f"{driver}/")
        try:
            amount = parse_exact_quantity(value)
            if amount.denominator != 1:
                raise BadQuantity("a whole number")
        except BadQuantity as error:
            text = f"{name[:80]} is {str(value)[:40]!r}, expected {error}"
            raise InvalidClaim(text) from None
        capacity[name] = int(amount)
    if not 1 <= capacity[CPU_CAPACITY] <= CPUSet.LIMIT:
        raise InvalidClaim(
            f"consumes {capacity[CPU_CAPACITY]} of {driver}/{CPU_CAPACITY}, expected 1 or more "
            "CPUs (does the API server know consumable capacity, DRAConsumableCapacity?)"
        )
    return capacity


def _request_parameters(
    request: set[str], configs: Sequence[Mapping[str, Any]], driver: str
) -> Iterator[tuple[str, str]]:
    """Yield parameters of a request by its names: first those of the class, then the claim's."""
    for config in sorted(configs, key=lambda one: one.get("source") != "FromClass"):
        names = _require_list(config.get("requests") or [], "config.requests")
        if names and request.isdisjoint(map(str, names)):
            continue
        opaque = _require_mapping(config.get("opaque") or {}, "config.opaque")
        if opaque.get("driver") != driver:
            continue
        for key, value in _require_mapping(opaque.get("parameters"), "parameters").items():
            option = options.TABLE.by_key.get(key)
            choices_text = f"expected one of {', '.join(options.TABLE.claim_parameters)}"
            if option is None:
                raise InvalidClaim(f"parameter {str(key)[:80]!r} is unknown, {choices_text}")
            if obstacle := option.claim_obstacle:
                raise InvalidClaim(
                    f"parameter {key!r} is not for claims, because {obstacle}; {choices_text}"
                )
            if not isinstance(value, str) or len(value) > 256:
                value_text = str(value)[:80]
                raise InvalidClaim(
                    f"parameter {key} is {value_text!r}, expected a text as in the annotation"
                )
            yield key, value


# --- records ----------------------------------------------------------------------------------


def encode_record(claim: Claim) -> str:
    """Encode a claim as its record."""
    return msgspec.json.encode(claim, order="sorted").decode()


def decode_record(text: str) -> Claim:
    """Decode the text of `encode_record`; `InvalidClaim` if it is none, or of another version."""
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
    """Vendor and class of the driver's CDI devices."""
    return f"{driver}/claim"


def qualified_cdi_device_name(driver: str, uid: str, number: int) -> str:
    """Qualified name of the CDI device of a claim's result."""
    return f"{cdi_kind(driver)}={_unqualified_cdi_device_name(uid, number)}"


def _unqualified_cdi_device_name(uid: str, number: int) -> str:
    # Before CDI 0.5.0 a name may not begin with a digit.
    return f"claim-{uid}-{number}"


def cdi_document(driver: str, claim: Claim) -> str:
    """Build the CDI file of a claim: one variable for each result, supported since CDI 0.3.0."""
    return json.dumps(
        {
            "cdiVersion": "0.3.0",
            "kind": cdi_kind(driver),
            "devices": [
                {
                    "name": _unqualified_cdi_device_name(claim.uid, number),
                    "containerEdits": {
                        "env": [f"{claim_variable_name(claim.uid, number)}={result.request}"]
                    },
                }
                for number, result in enumerate(claim.results)
            ],
        },
        separators=(",", ":"),
    )


# --- Device metadata (KEP-5304): files that tell containers about their claims ---


def metadata_path(driver: str, claim: Claim, request: str) -> str:
    """Path of a request's file in the container; empty if a name is not valid."""
    kind, name = "resourceclaims", claim.name
    if claim.pod_claim:
        kind, name = "resourceclaimtemplates", claim.pod_claim
    if not (_OBJECT_NAME_PATTERN.fullmatch(name) and _OBJECT_NAME_PATTERN.fullmatch(request)):
        return ""
    directory = f"/var/run/kubernetes.io/dra-device-attributes/{kind}/{name}/{request}"
    return f"{directory}/{driver}-metadata.json"


def metadata_document(
    driver: str, pool: str, claim: Claim, entry: ClaimedDevice, cpus: Iterable[int], generation: int
) -> str:
    """Build the file: the NUMA node, and each CPU under dra-driver-cpu's attribute name."""
    numa = {NUMA_NODE_ATTRIBUTE: {"int": entry.numa_node}}
    devices: list[dict[str, Any]] = [
        {"name": numa_node_device_name(entry.numa_node), "attributes": numa}
    ]
    devices += (
        {"name": f"cpu{cpu}", "attributes": {**numa, "dra.cpu/cpuID": {"int": cpu}}} for cpu in cpus
    )
    body = {
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
                "name": entry.request,
                "devices": [{"driver": driver, "pool": pool, **device} for device in devices],
            }
        ],
    }
    # Readers use the first version that they support.
    versions = (f"metadata.resource.k8s.io/{version}" for version in ("v1beta1", "v1alpha1"))
    return "".join(f"{json.dumps({'apiVersion': version, **body})}\n" for version in versions)


def claim_variable_name(uid: str, number: int) -> str:
    """Name of the variable of a claim's result."""
    return f"{CLAIM_VARIABLE_PREFIX}{number}_{uid.upper().replace('-', '_')}"


def parse_claim_variable_names(variables: Sequence[str]) -> list[tuple[str, int]]:
    """Parse UID and number of results from names of variables, each once."""
    results: dict[tuple[str, int], None] = {}
    for name in variables:
        match = _CLAIM_VARIABLE_PATTERN.fullmatch(name)
        if match is not None and len(results) < MAX_CLAIM_RESULTS_PER_CONTAINER:
            results[match[2].lower().replace("_", "-"), int(match[1])] = None
    return list(results)


# --- types of values ----------------------------------------------------------------------------


def _require_mapping(value: object, subject: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise InvalidClaim(f"{subject} is {str(value)[:40]!r}, expected a mapping")
    return value


def _require_list(value: object, subject: str) -> list[Any]:
    if not isinstance(value, list) or len(value) > 256:
        raise InvalidClaim(f"{subject} is {str(value)[:40]!r}, expected a list")
    return value


def _require_mappings(value: object, subject: str) -> list[Mapping[str, Any]]:
    return [_require_mapping(item, subject) for item in _require_list(value, subject)]


def _require_text(value: object, subject: str) -> str:
    if not isinstance(value, str) or not value or len(value) > 253:
        raise InvalidClaim(f"{subject} is {str(value)[:40]!r}, expected a text")
    return value
