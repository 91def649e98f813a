"""What is fuzzed, one class for each: makes an input from a random generator, and tries it.

An input is made by mutating a member of the corpus (``corpus/<target>/``), or from nothing. Trying
it returns a word for the outcome; any exception is a finding. The generator's seed is the whole
case.
"""

import base64
import io
import json
import random
import shutil
import string
import tempfile
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message

from nri_numa import config as configuration
from nri_numa import safe_yaml
from nri_numa.agent.handler import AgentHandler
from nri_numa.engine.assigned import sign_document
from nri_numa.engine.decision import Admitted, Rejected
from nri_numa.engine.request.annotations import resolve_placement_options
from nri_numa.engine.request.options import TABLE, PlacementOptions
from nri_numa.engine.state import NodeState
from nri_numa.errors import ConfigError
from nri_numa.machine.cgroups import cgroup_relative_path
from nri_numa.machine.hotplug import concerns_cpus
from nri_numa.machine.synthetic import build_synthetic_topology
from nri_numa.model.reasons import Rejection
from nri_numa.model.workload import ChangedStateIds, QoSClass, Resources
from nri_numa.nri.wire.pb import nri_pb2 as pb
from nri_numa.nri.wire.session import PluginSession, RuntimeSession
from nri_numa.nri.wire.versions import Event
from nri_numa.observe import logs
from nri_numa.runtime import RequestRejected
from nri_numa.store import journal
from nri_numa.store.checkpoint import CheckpointStore
from tests.beds import peer_bytes
from tests.beds.nri_requests import NRIRequests
from tests.beds.wire import feed
from tests.beds.world import PREFIX, World, container, pod, resources

CORPUS = Path(__file__).with_name("corpus")
MACHINE = build_synthetic_topology(sockets=2, numa_per_socket=1, cores_per_numa=4, memory_gib=8)

INTERESTING = (
    "", "0", "-1", "1", "0-3", "0-3,8", "3-0", "0-", "-", ",", "0,,1", "1023", "1024", "9" * 40,
    "0-99999999999", "0-3:2/4", "all", " 1", "1\n", "٣", "0x1", "1e9", "true", "null", "none",
    "cpu+mem", "exclusive", "single-numa-node", "restricted", "best-effort", "widen", "full-core",
    "24:00-25:00", "23:59-00:00", "09:00-18:00", "high", "low",
    "\0", "\ud800", "\u202e", "a" * 5000,
)  # fmt: skip


def text(rng: random.Random) -> str:
    """A text that some parser may not like."""
    choice = rng.randrange(6)
    if choice < 3:
        return rng.choice(INTERESTING)
    if choice == 3:
        return "".join(rng.choice("0123456789-,:. ") for _ in range(rng.randrange(12)))
    if choice == 4:
        return rng.choice(INTERESTING) + rng.choice(INTERESTING)
    return "".join(
        rng.choice(string.printable + "é٣\u202e\0\x1b") for _ in range(rng.randrange(20))
    )


def mutate(rng: random.Random, data: bytes) -> bytes:
    """Damage some bytes: flips, cuts, repeats, insertions."""
    mutated = bytearray(data)
    for _ in range(rng.randrange(1, 5)):
        place = rng.randrange(len(mutated) + 1)
        match rng.randrange(6):
            case 0 if mutated:
                mutated[place % len(mutated)] ^= 1 << rng.randrange(8)
            case 1:
                del mutated[place : place + rng.randrange(1, 20)]
            case 2:
                mutated[place:place] = rng.randbytes(rng.randrange(1, 8))
            case 3:
                mutated[place:place] = mutated[place : place + rng.randrange(1, 60)]
            case 4:
                mutated[place:place] = text(rng).encode(errors="surrogatepass")
            case _:
                del mutated[place:]
    return bytes(mutated)


def damaged(rng: random.Random, value: Any) -> Any:
    """A document with something else somewhere in it."""
    if isinstance(value, dict) and value and rng.random() < 0.85:
        key = rng.choice(sorted(value))
        changed = {**value, key: damaged(rng, value[key])}
        if rng.random() < 0.1:
            changed[text(rng)] = changed.pop(key)
        return changed
    if isinstance(value, list) and value and rng.random() < 0.7:
        place = rng.randrange(len(value))
        return [*value[:place], damaged(rng, value[place]), *value[place + 1 :]]
    values: tuple[Any, ...] = (
        text(rng), None, 0, -1, 10**30, 1.5e308, [], {}, True, [[1]], {"0": [1, 2, {}]},
    )  # fmt: skip
    return rng.choice(values)


class Target(ABC):
    """One thing to fuzz.

    Attributes:
        found: inputs that a fuzzer found (`tests.fuzz.guided`); anything.
    """

    name: ClassVar[str]

    def __init__(self) -> None:
        directory = CORPUS / self.name
        self.corpus = [path.read_bytes() for path in sorted(directory.glob("*"))]
        found = CORPUS / f"{self.name}.base64"
        lines = found.read_bytes().split() if found.exists() else []
        self.found = [base64.b64decode(line) for line in lines]

    def from_damaged(self, rng: random.Random) -> bytes:
        """A document of the corpus with values that it should not have."""
        document = safe_yaml.parse_yaml12(rng.choice(self.corpus).decode())
        return json.dumps(damaged(rng, document)).encode()

    def from_corpus(self, rng: random.Random) -> bytes:
        """A member of the corpus, nearly always damaged."""
        data = rng.choice([*self.corpus, *self.found])
        return data if rng.random() < 0.05 else mutate(rng, data)

    def one(self, rng: random.Random) -> str:
        """Make one input and try it; returns a word for the outcome."""
        return self.feed(self.from_corpus(rng))

    def replay(self) -> int:
        """Try the corpus itself; how many inputs that were."""
        for data in (*self.corpus, *self.found):
            self.feed(data)
        return len(self.corpus) + len(self.found)

    @abstractmethod
    def feed(self, data: bytes) -> str:
        """Try one input; returns a word for the outcome."""

    def close(self) -> None:
        """Remove what it made; most make nothing."""
        return


class Stored(Target):
    """A target with a directory of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp(prefix="nri-numa-fuzz-"))

    def close(self) -> None:
        shutil.rmtree(self.directory, ignore_errors=True)


class Protocol(Target):
    """Bytes of the peer to both roles: events or RemoteProtocolError."""

    name = "protocol"

    def one(self, rng: random.Random) -> str:
        """A conversation, damaged and in pieces."""
        data = peer_bytes.conversation(rng, rng.randrange(40))
        return self.played([list(peer_bytes.cuts(rng, data)) for _ in range(2)])

    def feed(self, data: bytes) -> str:
        return self.played([[data], [data]])

    def played(self, packets: list[list[bytes]]) -> str:
        """What came of the packets of each role."""
        plugin = PluginSession()
        plugin.max_objects, plugin.max_bytes = 10_000, 8 << 20
        plugin.register_plugin("fuzz", "10")
        roles = zip((plugin, RuntimeSession()), packets, strict=True)
        return "/".join("remote" if feed(role, said)[1] else "ok" for role, said in roles)


class Annotations(Target):
    """What pods write, up to the decision: requested or one sentence, never an exception."""

    name = "annotations"

    def __init__(self) -> None:
        super().__init__()
        self.world = World(MACHINE)
        self.world.synchronize()

    def one(self, rng: random.Random) -> str:
        """A few annotations, most with our prefix."""
        if rng.random() < 0.3:
            return self.feed(self.from_corpus(rng))
        annotations = {}
        for _ in range(rng.randrange(1, 5)):
            key = rng.choice(TABLE.keys) if rng.random() < 0.9 else text(rng)
            suffix = rng.choice(("", "", "", ".app", ".other", "."))
            name = f"{PREFIX}{key}{suffix}" if rng.random() < 0.9 else f"{key}.{PREFIX}pod"
            annotations[name] = text(rng)
        return self.judge(annotations)

    def feed(self, data: bytes) -> str:
        """A JSON object of texts; other JSON and rubbish are no input."""
        try:
            document = json.loads(data)
        except (ValueError, RecursionError):
            return "no input"
        if not isinstance(document, dict):
            return "no input"
        return self.judge({str(key): str(value) for key, value in document.items()})

    def judge(self, annotations: Mapping[str, str]) -> str:
        """Resolve, decide, and take it back."""
        of = pod("fuzz", {}, qos=QoSClass.GUARANTEED)
        of.annotations.update(annotations)  # type: ignore[attr-defined]
        made = container(of, wants=resources(2, 1))
        requested = resolve_placement_options(self.world.settings, of, made)
        assert isinstance(requested, PlacementOptions | Rejection)
        answer = self.world.agent.create_container(of, made)
        assert isinstance(answer, Admitted | Rejected)
        outcome = "admitted"
        if isinstance(answer, Rejected):
            assert "\n" not in answer.message, answer.message
            assert len(answer.message) < 3000, len(answer.message)
            assert not isinstance(requested, Rejection) or answer.reason == "InvalidAnnotation"
            outcome = answer.reason
        self.world.agent.stop_container(made.id)
        self.world.agent.remove_pod(of.uid, of.id)
        assert not self.world.agent.current.state.allocations
        return outcome


class Assigned(Target):
    """Our own annotation on a running container, as somebody may have forged it."""

    name = "assigned"

    def one(self, rng: random.Random) -> str:
        """A damaged copy of what we write, or a document with fields of other types."""
        return self.feed(self.from_corpus(rng) if rng.random() < 0.5 else self.from_damaged(rng))

    def feed(self, data: bytes) -> str:
        """Adopt three that carry it: plain, with our signature, and for a pod that asks for it."""
        world = World(MACHINE)
        note = data.decode(errors="replace")
        for name in ("one", "signed", "two"):
            of = pod(name, {} if name == "one" else {"cpus": "exclusive"})
            world.pods[of.id] = of
            made = container(of, wants=Resources(cpus="1", cpu_shares=1024))
            text = (
                sign_document(note.rstrip()[:-1], made.id, world.key) if name == "signed" else note
            )
            made.annotations[f"{PREFIX}assigned"] = text  # type: ignore[index]
            world.live[made.id] = made
        world.synchronize()
        state = world.agent.current.state
        assert len(state.allocations) == 3
        value = world.metrics.registry.get_sample_value("nri_numa_invariant_violations_total")
        assert value == 0
        return "/".join(sorted(a.kind.value for a in state.allocations.values()))


class Checkpoint(Stored):
    """The file of what was meant: used or set aside, and whatever it says, the node stays right."""

    name = "checkpoint"

    def one(self, rng: random.Random) -> str:
        """Damaged bytes, or intact lines with damaged documents in them."""
        data = self.from_corpus(rng)
        if rng.random() < 0.6:
            lines = rng.choice(self.corpus).split(b"\n")
            place = rng.randrange(len(lines))
            lines[place] = self.reframed(rng, lines[place])
            data = b"\n".join(lines)
        return self.feed(data)

    def reframed(self, rng: random.Random, line: bytes) -> bytes:
        """Damage the document of a line and make the line intact again."""
        parts = line.split(b" ", 4)
        if len(parts) != 5:
            return line
        try:
            body = json.dumps(damaged(rng, json.loads(parts[4]))).encode()
        except ValueError:
            body = mutate(rng, parts[4])
        if rng.random() < 0.2:
            body = mutate(rng, body)
        front = b"%b %b %d " % (parts[0], parts[1], len(body))
        return b"%b%08x %b" % (front, zlib.crc32(body, zlib.crc32(front)), body)

    def feed(self, data: bytes) -> str:
        """Load, restore, compare notes with a runtime that has two containers, and store again."""
        shutil.rmtree(self.directory)
        self.directory.mkdir(mode=0o700)
        path = self.directory / "checkpoint"
        path.touch(mode=0o600)
        path.write_bytes(data)
        identity = {"version": "t", "machine": "m", "boot": "b"}
        store = CheckpointStore(str(self.directory), identity=identity, clock=lambda: 1.0)
        try:
            loaded = store.load()
            state, problems = journal.state_from(loaded.entries)
            world = World(MACHINE)
            world.agent.current.restore_state(state)
            for name in ("one", "two"):
                of = pod(name)
                world.pods[of.id] = of
                made = container(of, wants=Resources(cpus="1"), id=f"c{name}")
                world.live[made.id] = made
            world.synchronize()
            value = world.metrics.registry.get_sample_value("nri_numa_invariant_violations_total")
            assert value == 0, world.agent.current.state
            world.place(pod("next"))
            for container_id in list(world.live):
                world.stop(container_id)
            assert not world.agent.current.state.exclusive
            whole = ChangedStateIds(containers=tuple(state.allocations), pods=tuple(state.pods))
            store.append_documents(journal.changed_documents(NodeState(), state, whole))
        finally:
            store.close()
        return f"{len(loaded.entries)} entries" + (" damaged" if problems else "")


class Config(Target):
    """Configuration files, and the text a runtime hands over: a configuration, or every mistake."""

    name = "config"

    def one(self, rng: random.Random) -> str:
        """A damaged file, or one with values of other types."""
        return self.feed(self.from_corpus(rng) if rng.random() < 0.6 else self.from_damaged(rng))

    def feed(self, data: bytes) -> str:
        """As a file would be, and as text over a configuration."""
        said = None
        try:
            loaded = configuration.load_config(None, {}, {}, text=data.decode(errors="replace"))
            configuration.validate_config(loaded, MACHINE)
        except ConfigError as error:
            said = error.problems
        assert said is None or (said and all(len(problem) < 2000 for problem in said))
        return "ok" if said is None else "refused"


class Requests(Target):
    """Requests of the runtime that are well-formed and make no sense."""

    name = "requests"

    def __init__(self) -> None:
        super().__init__()
        self.world = World(MACHINE)
        self.link = NRIRequests(AgentHandler(self.world.agent))
        self.link.synchronize([], [])
        self.requests: tuple[tuple[str, type[Message], Callable[[Any], object]], ...] = (
            ("create", pb.CreateContainerRequest, self.link.create_container),
            ("update", pb.UpdateContainerRequest, self.link.update_container),
            ("stop", pb.StopContainerRequest, self.link.stop_container),
            ("synchronize", pb.SynchronizeRequest, self._synchronize),
            ("remove", pb.RemoveContainerRequest, self._remove),
            ("remove pod", pb.RemovePodSandboxRequest, self._remove_pod),
        )

    def one(self, rng: random.Random) -> str:
        """One request with random fields; ids come from a handful, so that some fit together."""
        name, kind, handle = rng.choice(self.requests)
        message = kind()
        self.fill(rng, message, 0)
        return self.asked(name, handle, message)

    def feed(self, data: bytes) -> str:
        """The first byte says which request the others are; what is no such message is no input."""
        name, kind, handle = self.requests[data[0] % len(self.requests) if data else 0]
        try:
            message = kind.FromString(data[1:])
        except DecodeError:
            return "no input"
        return self.asked(name, handle, message)

    def asked(self, name: str, handle: Callable[[Any], object], message: Message) -> str:
        """Handle it: refused in one line or done, and nobody's CPUs are given twice."""
        said = "ok"
        try:
            handle(message)
        except RequestRejected as rejected:
            said = str(rejected)
        assert "\n" not in said
        metrics = self.world.metrics.registry
        assert metrics.get_sample_value("nri_numa_invariant_violations_total") == 0
        if len(self.world.agent.current.state.allocations) > 40:
            self.link.synchronize([], [])
            assert not self.world.agent.current.state.exclusive
        return f"{name} {said.partition(':')[0]}"

    def _synchronize(self, message: pb.SynchronizeRequest) -> None:
        self.link.synchronize(message.pods, message.containers)

    def _remove(self, message: pb.RemoveContainerRequest) -> None:
        self.link.container_event(Event.REMOVE_CONTAINER, message.pod, message.container)

    def _remove_pod(self, message: pb.RemovePodSandboxRequest) -> None:
        self.link.pod_event(Event.REMOVE_POD_SANDBOX, message.pod)

    def fill(self, rng: random.Random, message: Message, depth: int) -> None:
        for field in message.DESCRIPTOR.fields:
            if rng.random() < 0.5 or depth > 5:
                continue
            if field.message_type is not None and field.message_type.GetOptions().map_entry:
                mapping = getattr(message, field.name)
                for _ in range(rng.randrange(3)):
                    key = f"{PREFIX}{rng.choice(TABLE.keys)}" if rng.random() < 0.7 else "k"
                    value = field.message_type.fields_by_name["value"]
                    if value.type == FieldDescriptor.TYPE_STRING:
                        mapping[key] = clean(rng)
            elif field.is_repeated:
                for _ in range(rng.randrange(3)):
                    if field.message_type is not None:
                        self.fill(rng, getattr(message, field.name).add(), depth + 1)
                    elif field.type == FieldDescriptor.TYPE_STRING:
                        getattr(message, field.name).append(clean(rng))
            elif field.message_type is not None:
                inner = getattr(message, field.name)
                inner.SetInParent()
                self.fill(rng, inner, depth + 1)
            elif field.type == FieldDescriptor.TYPE_STRING:
                named = "id" in field.name
                value_text = rng.choice(("a", "b", "c", "d")) if named else clean(rng)
                setattr(message, field.name, value_text)
            elif field.type == FieldDescriptor.TYPE_BOOL:
                setattr(message, field.name, rng.random() < 0.5)
            elif field.type in (FieldDescriptor.TYPE_INT64, FieldDescriptor.TYPE_UINT64):
                low = 0 if field.type == FieldDescriptor.TYPE_UINT64 else -(1 << 63)
                choices = (0, 1, 2, 1024, 100_000, 400_000, 1 << 30, (1 << 63) - 1, low)
                setattr(message, field.name, rng.choice(choices))


def clean(rng: random.Random) -> str:
    return text(rng).encode(errors="replace").decode()


class Small(Target):
    """Parsers of a line or two: uevents and cgroup paths."""

    name = "small"

    def one(self, rng: random.Random) -> str:
        event = mutate(rng, b"online@/devices/cpu3\0ACTION=online\0SUBSYSTEM=cpu\0")
        if rng.random() < 0.5:
            path = mutate(rng, b"kubepods-burstable-pod1.slice:cri-containerd:abc")
        else:
            path = f"/{text(rng)}".encode(errors="replace")
        return self.feed(event + b"\n" + path)

    def feed(self, data: bytes) -> str:
        """An event, and a path behind the last line feed."""
        event, _, given = data.rpartition(b"\n")
        concerns = concerns_cpus(event)
        path = cgroup_relative_path(given.decode(errors="replace"))
        assert not path.startswith("/")
        assert ".." not in path.split("/")
        return f"{concerns} {bool(path)}"


def quiet() -> None:
    """Log lines go nowhere; making them is part of what is fuzzed."""
    logs.setup_logging("info", stream=io.StringIO())
