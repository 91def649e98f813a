"""The agent's side of the kubelet's DRA calls: claims prepared on a node in memory."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from nri_numa.agent.claims import ClaimStore
from nri_numa.config import AgentConfig
from nri_numa.config.sections import DRA, Devices
from nri_numa.dra.claims import InvalidClaim
from nri_numa.dra.handover import ClaimFileRequester
from nri_numa.model.cpuset import CPUSet
from nri_numa.model.settings import Settings
from tests.beds.resource_claims import DRIVER, UID, claim, result
from tests.beds.world import World
from tests.machines import named as machines

OTHER = UID[:-1] + "b"


def claim_config(state: Path, cdi: Path) -> AgentConfig:
    """Configure the driver, with its records and CDI files in these directories."""
    devices, dra = Devices(cdi_spec_dirs=(str(cdi),)), DRA(enabled=True, driver=DRIVER)
    return AgentConfig(state_dir=str(state), devices=devices, dra=dra)


class ClaimBed:
    """A node's directories, and books over them."""

    def __init__(self, directory: Path) -> None:
        self.records, self.cdi = directory / "state/claims", directory / "cdi"
        self.world = World(machines.dual_no_smt(), Settings(reserved_cpus=CPUSet.parse("8")))
        self.objects: dict[str, Any] = {UID: self.claim()}
        self.waits = 0
        self.meanwhile: Callable[[], object] = lambda: None
        self.book = self.boot()

    @staticmethod
    def claim(*results: dict[str, Any], pods: str = "uid-web", **more: Any) -> dict[str, Any]:
        document = claim(*(results or (result(),)), **more)
        document["status"]["reservedFor"] = [{"resource": "pods", "name": "w", "uid": pods}]
        document["metadata"]["namespace"] = "default"
        return document

    def boot(self) -> ClaimStore:
        bed = self

        class FromObjects(ClaimFileRequester):
            def fetch_claim(self, namespace: str, name: str, uid: str) -> object:
                if uid not in bed.objects:
                    raise InvalidClaim("not found")
                found = bed.objects[uid]
                return found() if callable(found) else found

        self.book = ClaimStore(
            claim_config(self.records.parent, self.cdi),
            "n1",
            FromObjects(str(self.cdi)),
            self.world.agent.current,
            sleep=self.wait,
        )
        self.book.load_records()
        return self.book

    def wait(self, seconds: float) -> None:
        """What happens while a claim is being prepared."""
        self.waits += 1
        self.meanwhile()

    def prepare(self, uid: str = UID) -> Any:
        return self.book.prepare_claim("default", "four", uid)

    def files(self) -> tuple[list[str], list[str]]:
        return (
            sorted(one.name for one in self.records.glob("*")),
            sorted(one.name for one in self.cdi.glob("*")),
        )
