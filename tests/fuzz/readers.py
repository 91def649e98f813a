"""More fuzz targets: readers of what others wrote that take bytes and keep nothing.

Each is fed whole inputs, so that a fuzzer that knows nothing but coverage (`tests.fuzz.guided`) can
drive it as well as a damaged member of the corpus can.
"""

import asyncio
import contextlib
import json

import h11
import msgspec

from nri_numa import config as configuration
from nri_numa import safe_yaml
from nri_numa.agent.history import DecisionHistory
from nri_numa.agent.http_api import AgentServer
from nri_numa.cluster.manifests import ManifestError
from nri_numa.engine.request.annotations import resolve_placement_options
from nri_numa.engine.request.demand import SLOTS_KEY, parse_slots, with_slots
from nri_numa.kubelet.configuration import (
    decode_kubelet_facts,
    merge_file_and_drop_ins,
    parse_command_line,
)
from nri_numa.kubelet.state_files import (
    STATE_DECODE_ERRORS,
    combine_manager_grants,
    decode_cpu_grants,
    decode_memory_grants,
)
from nri_numa.model.reasons import Rejection
from nri_numa.model.workload import NO_GRANTS
from nri_numa.observe.metrics import Metrics
from nri_numa.observe.notices import NoticedContainer
from nri_numa.simulate.manifests import read_manifests_from_text
from nri_numa.store.history_file import HistoryFile
from nri_numa.web.protocol import JSON_CONTENT_TYPE, HTTPConnection
from nri_numa.web.server import ConnectionSlot
from tests.beds.http_view import FakeView
from tests.beds.world import PREFIX, World, container, pod, resources
from tests.fuzz import targets
from tests.fuzz.targets import MACHINE, Target


class SlotIds(Target):
    """The ids that the kubelet handed to a container, and a pod's annotations beside them."""

    name = "slots"

    def __init__(self) -> None:
        super().__init__()
        self.settings = World(MACHINE).settings

    def feed(self, data: bytes) -> str:
        """The first line is the ids, further ones are ``key=value``."""
        ids, *lines = data.decode(errors="replace").split("\n")
        found = parse_slots(ids)
        if not isinstance(found, str):
            assert found.count == len(ids.split(","))
            assert sum(found.by_node.values()) in (0, found.count)
        of = pod("fuzz", dict(line.partition("=")[::2] for line in lines[:4]))
        made = container(of, wants=resources(2, 1))
        made.annotations[f"{PREFIX}{SLOTS_KEY}"] = ids  # type: ignore[index]
        requested = with_slots(
            self.settings, of, made, resolve_placement_options(self.settings, of, made)
        )
        if isinstance(requested, Rejection):
            assert "\n" not in requested.detail
            assert len(requested.detail) < 3000
            return requested.reason
        return f"{requested.cpus} {requested.slots is not None}"


class KubeletState(Target):
    """``cpu_manager_state`` and ``memory_manager_state``: grants, or one sentence."""

    name = "kubelet-state"

    def feed(self, data: bytes) -> str:
        """As either of them, and put together."""
        cpu = memory = NO_GRANTS
        with contextlib.suppress(*STATE_DECODE_ERRORS):
            cpu = decode_cpu_grants(data)
        with contextlib.suppress(*STATE_DECODE_ERRORS):
            memory = decode_memory_grants(data)
        cpus, mems = MACHINE.online, MACHINE.numa_ids
        found, problems = combine_manager_grants(cpu, memory, cpus, mems, NO_GRANTS)
        for granted in (*found.cpus.values(), *found.pods.values(), *found.shared):
            assert granted <= cpus
        assert all(len(sentence) < 3000 for sentence in problems)
        read = cpu is not NO_GRANTS, memory is not NO_GRANTS
        return f"{read} {bool(found.cpus)} {bool(found.mems)}"


class KubeletConfig(Target):
    """The kubelet's configuration file, a drop-in, and a command line."""

    name = "kubelet-config"

    def feed(self, data: bytes) -> str:
        """Parts end at ``%%``: the file, the drop-in, the words of the command line."""
        parts = [*data.decode(errors="replace").split("%%", 2), "", ""][:3]
        documents: list[tuple[str, object]] = []
        unread = 0
        for name, text in zip(("file", "drop-in"), parts, strict=False):
            try:
                documents.append((name, safe_yaml.parse_yaml12(text)))
            except ValueError:
                unread += 1
        whole, left_out = merge_file_and_drop_ins(documents)
        flags = parse_command_line(["kubelet", *parts[2].split("\0")])
        assert all(len(problem) < 3000 for problem in left_out)
        try:
            decode_kubelet_facts(whole, flags.values)
        except (ValueError, msgspec.ValidationError) as error:
            return f"{unread} {len(left_out)} {type(error).__name__}"
        return f"{unread} {len(left_out)}"


class History(targets.Checkpoint):
    """The file of history: what its notices say goes on, or a new sequence begins."""

    name = "history"
    identity = {"boot": "b", "machine": "m"}  # noqa: RUF012  # nobody changes it

    def feed(self, data: bytes) -> str:
        """Open it, let something happen again, and open it once more: nothing is lost."""
        (self.directory / "history").write_bytes(data)
        problem, file, made = self.opened()
        notices = made.notices
        before = notices.number
        for one in notices.notices_after()[:1]:
            names = NoticedContainer(one.namespace, one.pod, one.pod_uid, one.container)
            notices.add_notice(names, one.notice_kind, one.message, reason=one.reason)
        file.stop_writing()
        unread, file, kept = self.opened()
        file.stop_writing()
        assert unread == ""
        assert kept.notices.instance == notices.instance
        assert kept.notices.number == notices.number >= before
        assert kept.notices.notices_after() == notices.notices_after()
        assert len(kept.rejections) == len(made.rejections)
        return f"{bool(problem)} {len(kept.rejections)} {min(len(notices.notices_after()), 3)}"

    def opened(self) -> tuple[str, HistoryFile, DecisionHistory]:
        """What was wrong, the open file, and what was restored from it."""
        made = World(MACHINE).history
        file = HistoryFile(str(self.directory), identity=self.identity, history=made)
        return file.restore_and_open({}), file, made


class Manifests(Target):
    """Manifests of `simulate`: workloads, or every mistake on a line of its own."""

    name = "manifests"

    def feed(self, data: bytes) -> str:
        problems: tuple[str, ...] = ()
        try:
            found = read_manifests_from_text(data.decode(errors="replace"), "f.yaml")
        except ManifestError as error:
            problems = error.problems
            found = None
        assert all(len(problem) < 3000 for problem in problems)
        if found is None:
            assert problems
            return "refused"
        return f"{min(len(found.workloads), 3)} {min(len(found.notes), 3)}"


class _Writer:
    """A stream's writer that keeps what was written."""

    def __init__(self) -> None:
        self.data = bytearray()

    def write(self, data: bytes) -> None:
        self.data += data

    def get_extra_info(self, name: str) -> None:
        """It shows no certificate."""

    async def drain(self) -> None:
        """Never has to wait."""


class HTTP(Target):
    """What clients send to the HTTP address, from the first byte to the answers."""

    name = "http"

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        config = configuration.load_config(None, {}, {}).http
        self.server = AgentServer(config, FakeView(), Metrics("0"))

    def close(self) -> None:
        self.loop.close()

    def feed(self, data: bytes) -> str:
        """A connection that says it all at once and waits for the answers."""
        return self.loop.run_until_complete(self.played(data))

    async def played(self, data: bytes) -> str:
        """The answers are HTTP, none blames us, and JSON where they say so."""
        reader, writer = asyncio.StreamReader(), _Writer()
        reader.feed_data(data)
        reader.feed_eof()
        place = ConnectionSlot("127.0.0.1", self.loop.time())
        with contextlib.suppress(EOFError, h11.LocalProtocolError):
            async with asyncio.timeout(5) as limit:
                connection = HTTPConnection(reader, writer, limit)  # type: ignore[arg-type]
                while await self.server._serve_request(connection, place):
                    assert place.answered < 500
        answers = bytes(writer.data)
        assert answers.startswith(b"HTTP/1.1 ") or not answers
        head, _, body = answers.partition(b"\r\n\r\n")
        status = head[9:12].decode()
        assert status != "500"
        if body and f"Content-Type: {JSON_CONTENT_TYPE}".encode() in head and place.answered == 1:
            with contextlib.suppress(UnicodeDecodeError):
                if b"chunked" not in head:
                    json.loads(body)
        return f"{status} {min(place.answered, 3)}"
