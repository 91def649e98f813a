"""ResourceClaims on this node: prepared for the kubelet, recorded, and matched to containers.

A preparation reads the claim, validates it, writes its record, writes its CDI file, and adds it.
What is missing after a kill is made from the record when the kubelet repeats its call, or at the
next start. Unpreparing removes the record first.

Its CPUs are chosen when its container is created, by the engine: what a claim holds reaches it as
an annotation of the container (`nri_numa.engine.request.demand`), which the agent makes here from a
variable that the CDI file put there. A pod can write such a variable by hand: it counts only for
pods that the claim is reserved for.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from nri_numa.config import AgentConfig, driver_sockets
from nri_numa.dra import handover
from nri_numa.dra.claims import (
    CPU_CAPACITY,
    DRA_DRIVER_CPU_VARIABLE_PREFIX,
    MAX_CLAIM_BYTES,
    MEMORY_CAPACITY,
    Claim,
    ClaimedDevice,
    InvalidClaim,
    cdi_document,
    decode_record,
    encode_record,
    is_uid,
    metadata_document,
    metadata_path,
    numa_node_device_name,
    parse_claim,
    parse_claim_variable_names,
    qualified_cdi_device_name,
)
from nri_numa.engine.accounting import max_exclusive_by_node
from nri_numa.engine.node_model import NodeModel
from nri_numa.engine.request.annotations import OptionsResolver
from nri_numa.engine.request.demand import claim_result_text, parse_claims, with_slots
from nri_numa.engine.request.options import PlacementOptions
from nri_numa.engine.state import Allocation
from nri_numa.errors import RuntimeUnavailable
from nri_numa.model.cpuset import NO_CPUS, CPUSet
from nri_numa.model.machine import count_text, cpus_text, numa_text
from nri_numa.model.reasons import Rejection
from nri_numa.model.workload import Container, ContainerAdjustment, PodSandbox, Resources
from nri_numa.observe.logs import get_logger
from nri_numa.observe.reports import ReportOnce
from nri_numa.store.files import remove_flat_directory

if TYPE_CHECKING:
    from nri_numa.agent.current_state import CurrentState
    from nri_numa.dra.service import PreparedDevice


log = get_logger("dra")

_SOCKET_RETRY_S: Final = 10.0
"""Seconds until sockets that cannot be made are tried again."""
_FREE_CPU_POLL_INTERVAL_S: Final = 0.1
_CONTAINER_STOP_WAIT_S: Final = 10.0
"""Seconds to wait for the end of containers whose pod was deleted without a grace period: the
kubelet gives them two. It waits 45 for a claim, of which the publisher may need 20."""


class ClaimStore:
    """Claims prepared on this node.

    Their records are in the state directory, their CDI files in the runtime's.

    Attributes:
        claims: by UID; replaced as a whole, so that any thread may read it.
    """

    def __init__(
        self,
        config: AgentConfig,
        pool: str,
        asker: handover.ClaimFileRequester,
        current: CurrentState,
        *,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self._driver, self._pool = config.dra.driver, pool
        self._records = os.path.join(config.state_dir, "claims")
        self._cdi, self._about = config.devices.cdi_spec_dirs[-1], f"{self._records}-metadata"
        self._asker, self._current, self._sleep = asker, current, sleep
        self._turn = threading.Lock()
        self.claims: Mapping[str, Claim] = {}

    def load_records(self) -> None:
        """Read the records, and repair the CDI files."""
        try:
            os.makedirs(self._records, mode=0o700, exist_ok=True)
        except OSError as error:  # each preparation reports it too
            log.warning("claim records not stored", problem=str(error))
        claims: dict[str, Claim] = {}
        for name in sorted(handover.list_file_names(self._records)):
            uid = name.removesuffix(".json")
            if name.startswith(".") or not is_uid(uid):
                with contextlib.suppress(OSError):
                    os.unlink(os.path.join(self._records, name))  # cut short by a kill
                continue
            try:
                claim = decode_record(
                    handover.read_small_file_or_raise(self._record_path(uid), MAX_CLAIM_BYTES)
                )
                if claim.uid != uid:
                    raise InvalidClaim(f"a record of claim {claim.uid[:60]!r}, expected {uid}")
            except (InvalidClaim, OSError) as error:
                log.warning("claim record unreadable", claim_uid=uid, problem=str(error))
                continue
            claims[uid] = claim
        self.claims = claims
        for uid in {*handover.list_file_names(self._about)} - claims.keys():
            with contextlib.suppress(OSError):
                remove_flat_directory(os.path.join(self._about, uid))
        self._repair_cdi_files(claims)
        self._asker.remove_leftovers()
        log.info("claims restored", restored=len(claims))

    def _repair_cdi_files(self, claims: Mapping[str, Claim]) -> None:
        prefix = f"{self._driver}-claim_"
        for name in handover.list_file_names(self._cdi):
            mine = name.startswith((prefix, f".{prefix}"))
            if mine and name.removeprefix(prefix).removesuffix(".json") not in claims:
                with contextlib.suppress(OSError):
                    os.unlink(os.path.join(self._cdi, name))
        for claim in claims.values():
            try:
                self._write_cdi_file(claim)
            except OSError as error:
                log.warning("CDI file not written", claim_uid=claim.uid, problem=str(error))

    def on_driver_registered(self) -> None:
        """Tell the publisher that the kubelet has registered the driver."""
        self._asker.write_registration_marker()

    # --- the kubelet's calls ----------------------------------------------------------------------

    def prepare_claim(self, namespace: str, name: str, uid: str) -> list[PreparedDevice]:
        """Prepare a claim; idempotent.

        Raises:
            InvalidClaim: it cannot be read, or not be satisfied on this node.
            OSError: its files cannot be written.
        """
        from nri_numa.dra.service import PreparedDevice

        if not is_uid(uid):
            raise InvalidClaim(f"claim {namespace}/{name} has UID {uid[:60]!r}, expected a UUID")
        claim = self._read_claim(namespace, name, uid)  # may take long, so outside of the lock
        with self._turn:
            prior = self.claims.get(uid)
            validate_claim(self._current.machine, claim)
            if prior is not None and prior.results != claim.results:
                raise InvalidClaim(
                    f"claim {claim.full_name} is prepared with another allocation, expected the "
                    "same until it is unprepared"
                )
            if claim != prior:
                handover.write_file_atomically(
                    self._record_path(uid), encode_record(claim), mode=0o600
                )
            self._write_cdi_file(claim)
            self.claims = {**self.claims, uid: claim}
        if prior is None:
            self._await_free_cpus(claim)
            log.info(
                "claim prepared", claim=claim.full_name, claim_uid=uid, devices=_results_text(claim)
            )
        return [
            PreparedDevice(
                request=result.request,
                pool=self._pool,
                device=numa_node_device_name(result.numa_node),
                cdi=qualified_cdi_device_name(self._driver, uid, number),
                share_id=result.share_id,
            )
            for number, result in enumerate(claim.results)
        ]

    def _await_free_cpus(self, claim: Claim) -> None:
        """Wait for the end of containers that the API server no longer counts.

        A rejected container would come back only after the kubelet's back-off.
        """
        demand: Counter[int] = Counter()
        for result in claim.results:
            demand[result.numa_node] += result.cpus
        for _ in range(round(_CONTAINER_STOP_WAIT_S / _FREE_CPU_POLL_INTERVAL_S)):
            free_cpus = max_exclusive_by_node(self._current.desired)
            if all(free_cpus.get(i, 0) >= cpus for i, cpus in demand.items()):
                return
            self._sleep(_FREE_CPU_POLL_INTERVAL_S)

    def unprepare_claim(self, uid: str) -> None:
        """Forget a claim; an unknown one is ignored.

        Raises:
            OSError: its files cannot be removed.
        """
        if not is_uid(uid):
            return
        with self._turn:
            for path in (self._record_path(uid), self._cdi_file_path(uid)):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)
            with contextlib.suppress(OSError):
                remove_flat_directory(os.path.join(self._about, uid))
            remaining_claims = dict(self.claims)
            removed_claim = remaining_claims.pop(uid, None)
            self.claims = remaining_claims
        if removed_claim is not None:
            log.info("claim unprepared", claim=removed_claim.full_name, claim_uid=uid)

    def _read_claim(self, namespace: str, name: str, uid: str) -> Claim:
        document = self._asker.fetch_claim(namespace, name, uid)
        claim = parse_claim(document, driver=self._driver, pool=self._pool)
        if (claim.namespace, claim.name, claim.uid) != (namespace, name, uid):
            raise InvalidClaim(
                f"claim {namespace}/{name} has UID {claim.uid} now, expected {uid}: "
                "it was recreated"
            )
        return claim

    def pool_and_device_health(self) -> tuple[str, Mapping[str, str]]:
        """Return the pool, and by device the problem of claimed CPUs that went offline."""
        topology = self._current.machine.topology
        cpus_by_node = dict.fromkeys(topology.cpu_nodes, NO_CPUS)
        for allocation in self._current.state.allocations.values():
            claimed, offline = parse_claims(allocation.slots), allocation.cpus - topology.online
            if claimed is None or allocation.reserved_at or not offline:
                continue
            online_counts = topology.cpu_count_by_node(allocation.cpus & topology.online)
            for i, count in claimed.by_node.items():  # the NUMA node of an offline CPU is unknown
                if online_counts.get(i, 0) < count:
                    cpus_by_node[i] = cpus_by_node.get(i, NO_CPUS) | offline
        return self._pool, {
            numa_node_device_name(i): f"{cpus_text(offline, 'is', 'are')} offline"
            if offline
            else ""
            for i, offline in sorted(cpus_by_node.items())
        }

    # --- the runtime's containers -----------------------------------------------------------------

    def complete_container(
        self, pod: PodSandbox, container: Container
    ) -> tuple[PodSandbox, Container]:
        """Add the results of its claims to a container; one without claims is unchanged."""
        named = parse_claim_variable_names(container.mentions.claims)
        if not named:
            return pod, container
        results: list[tuple[str, int, ClaimedDevice]] = []
        problem = ""
        for uid, number in named:
            claim = self.claims.get(uid)
            if claim is None or number >= len(claim.results):
                problem = f"its ResourceClaim {uid} is not prepared on this node"
                break
            if pod.uid not in claim.pods or pod.namespace != claim.namespace:
                problem = (
                    f"ResourceClaim {claim.full_name} was prepared for another pod; "
                    "expected a claim that no other pod uses at the same time"
                )
                break
            results.append((uid, number, claim.results[number]))
        key = self._current.machine.slots_annotation_key
        text = ",".join(claim_result_text(d.numa_node, u, n, d.cpus) for u, n, d in results)
        annotations = {**container.annotations, key: "" if problem else text}
        container = replace(container, annotations=annotations, claim_problem=problem)
        devices = [d for _, _, d in results]
        return with_claim_parameters(self._current.machine, pod, container, devices), container

    def extend_adjustment(
        self, allocation: Allocation, container: Container, base: ContainerAdjustment
    ) -> ContainerAdjustment:
        """Add files with a container's CPUs, and a variable if it has only one claim."""
        if not allocation.exclusive:
            return base
        named = parse_claim_variable_names(container.mentions.claims)
        base = replace(
            base, mounts=(*base.mounts, *self._write_device_metadata(named, base.cpus).items())
        )
        uids = {uid for uid, _ in named}
        if len(uids) != 1:
            return base  # with several claims, the CPUs of each are unknown
        return replace(
            base, env={**base.env, f"{DRA_DRIVER_CPU_VARIABLE_PREFIX}{uids.pop()}": base.cpus}
        )

    def _write_device_metadata(self, named: Sequence[tuple[str, int]], cpus: str) -> dict[str, str]:
        """Write files of device metadata; returns them by path in the container (KEP-5304)."""
        numa_nodes, mounts = self._current.machine.topology.numa_nodes, dict[str, str]()
        for uid, number in named:
            claim = self.claims[uid]
            result = claim.results[number]
            device_cpus = CPUSet.parse(cpus) & numa_nodes[result.numa_node].cpus
            if len(device_cpus) != result.cpus:
                device_cpus = NO_CPUS  # with several requests, the CPUs of each are unknown
            inside = metadata_path(self._driver, claim, result.request)
            path = os.path.join(self._about, uid, f"{number}.json")
            text = metadata_document(
                self._driver, self._pool, claim, result, device_cpus, int(time.time())
            )
            try:
                os.makedirs(os.path.dirname(path), exist_ok=True)
                handover.write_file_atomically(path, text)
                os.chmod(path, 0o644)  # any user of the container may read it
            except OSError as error:
                log.warning("device metadata not written", claim_uid=uid, problem=str(error))
            else:
                mounts |= {inside: path} if inside else {}
        return mounts

    # --- files ------------------------------------------------------------------------------------

    def _record_path(self, uid: str) -> str:
        return os.path.join(self._records, f"{uid}.json")

    def _cdi_file_path(self, uid: str) -> str:
        return os.path.join(self._cdi, f"{self._driver}-claim_{uid}.json")

    def _write_cdi_file(self, claim: Claim) -> None:
        text = cdi_document(self._driver, claim)
        path = self._cdi_file_path(claim.uid)
        with contextlib.suppress(OSError):
            if handover.read_small_file_or_raise(path, MAX_CLAIM_BYTES) == text:
                return
        os.makedirs(self._cdi, mode=0o755, exist_ok=True)
        handover.write_file_atomically(path, text)


def _results_text(claim: Claim) -> str:
    return ", ".join(
        f"{count_text(result.cpus, 'CPU')} of NUMA node {result.numa_node}"
        for result in claim.results
    )


async def serve_claims_to_kubelet(config: AgentConfig, store: ClaimStore) -> None:
    """Serve the kubelet until cancelled; gRPC is imported here, and serves in its own threads."""
    from nri_numa.dra.service import KubeletPlugin

    registry, endpoint = driver_sockets(config.kubelet_root, config.dra.driver)
    plugin = KubeletPlugin(config.dra.driver, registry, endpoint, store, store.on_driver_registered)
    problems = ReportOnce(log)
    try:
        while True:
            try:
                await asyncio.to_thread(plugin.start)
                break
            except RuntimeUnavailable as error:
                # Placement does not depend on it: the agent continues, and tries again.
                problems.report("DRA sockets not opened", str(error))
                await asyncio.sleep(_SOCKET_RETRY_S)
        log.info("DRA sockets opened", driver=config.dra.driver, socket=registry)
        await asyncio.Event().wait()
    finally:
        await asyncio.to_thread(plugin.stop)


# --- Validation of a claim on this machine ---

_CFS_PERIOD_US = 100_000


def validate_claim(machine: NodeModel, claim: Claim) -> None:
    """Check that this machine can satisfy a claim, and that its parameters are valid.

    Raises:
        InvalidClaim: with the first problem.
    """
    memory_nodes = machine.topology.memory_nodes
    for number, item in enumerate(claim.results):
        subject = f"claim {claim.full_name}, request {item.request}"
        node = machine.topology.numa_nodes.get(item.numa_node)
        if node is None or not node.cpus:
            raise InvalidClaim(
                f"{subject}: NUMA node {item.numa_node} does not exist or has no CPUs, expected "
                f"one of {machine.topology.cpu_nodes}"
            )
        usable = len(machine.allowed_cpus_by_node[item.numa_node] - machine.settings.reserved_cpus)
        memory = item.capacity.get(MEMORY_CAPACITY, 0)
        for resource, amount, limit in (
            (CPU_CAPACITY, item.cpus, usable),
            (MEMORY_CAPACITY, memory, node.memory_bytes),
        ):
            if amount > limit:
                raise InvalidClaim(
                    f"{subject}: takes {amount} of {resource}, and "
                    f"NUMA node {item.numa_node} has {limit}"
                )
        requested = _resolve_result_options(machine, claim, number)
        if isinstance(requested, Rejection):
            raise InvalidClaim(f"{subject}: {requested.detail}")
        # The engine compares the list of ``numamem`` with the machine when it places.
        listed = requested.listed_mems
        clause = f"{subject}: parameter numamem is {requested.numamem!r}, and"
        if listed and (missing := listed - memory_nodes):
            raise InvalidClaim(
                f"{clause} {numa_text(missing, 'has', 'have')} no memory for containers; expected "
                f"NUMA nodes among {memory_nodes}"
            )
        if listed and memory and item.numa_node not in listed:
            raise InvalidClaim(
                f"{clause} the claim takes memory of NUMA node {item.numa_node}; expected that one "
                "in it, or no memory in the claim"
            )


def with_claim_parameters(
    machine: NodeModel, pod: PodSandbox, container: Container, results: Sequence[ClaimedDevice]
) -> PodSandbox:
    """Add the parameters of a container's claims to its pod's annotations."""
    prefix = machine.settings.prefix
    annotations = {
        f"{prefix}/{key}.{container.name}": value
        for device in results
        for key, value in device.parameters.items()
    }
    # The pod's own annotations take precedence.
    return replace(pod, annotations={**annotations, **pod.annotations}) if annotations else pod


def _resolve_result_options(
    machine: NodeModel, claim: Claim, number: int
) -> PlacementOptions | Rejection:
    """Resolve the options of a container that has this result alone, and as many CPUs."""
    result = claim.results[number]
    pod = PodSandbox(id="", uid="", namespace=claim.namespace, name=claim.name)
    text = claim_result_text(result.numa_node, claim.uid, number, result.cpus)
    container = Container(
        id="",
        pod_id="",
        name="claim",
        annotations={machine.slots_annotation_key: text},
        resources=Resources(cpu_quota=result.cpus * _CFS_PERIOD_US, cpu_period=_CFS_PERIOD_US),
    )
    # The machine's resolver has a cache that only the loop's thread may use.
    resolve = OptionsResolver(machine.settings, machine.max_list_chars)
    options = resolve(with_claim_parameters(machine, pod, container, [result]), container)
    return with_slots(machine.settings, pod, container, options)
