"""CreateContainer while somebody attacks the HTTP side: who is placed, how fast, at what cost.

The runtime waits two seconds as containerd does, so a plugin that is kept busy is dropped here as
it would be there; with 10,000 containers it waits longer, to see how long Synchronize takes. Beside
the creates a liveness probe asks, over a new connection each time.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import ssl
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

from bench.beds import (
    MACHINES,
    PLAIN,
    REPOSITORY,
    SHARED,
    Bed,
    Shape,
    bed,
    container_of,
    environment,
    pod_of,
    rss_bytes,
    scratch,
)
from bench.stats import ms, summary, table
from tests.beds.embedded_runtime import EmbeddedRuntime

TOKEN = "0123456789abcdef0123456789abcdef"  # of a plugin that lives for a minute
PAUSE = 0.02
LIMIT = 30.0
"""Seconds after which a case ends, however many creates it got through."""
PROBE_TIMEOUT = 5.0
"""Seconds that a probe waits, as those of our manifests."""
SYNCHRONIZATIONS = 3


@dataclass(slots=True)
class Seen:
    """What one case showed."""

    seconds: list[float] = field(default_factory=list)
    created: int = 0
    placed: int = 0
    dropped: int = 0
    probes: list[float] = field(default_factory=list)
    """Seconds of each probe; `PROBE_TIMEOUT` without an answer."""
    answered: int = 0
    rss: int = 0
    fds: int = 0
    lines: int = 0
    beside: float = 0.0
    """CPU time of all threads but the one that answers the runtime, as a part of one CPU."""
    synchronize: list[str] = field(default_factory=list)


def _populate(count: int, shape: Shape) -> Callable[[EmbeddedRuntime], Awaitable[None]]:
    async def populate(runtime: EmbeddedRuntime) -> None:
        for n in range(count):
            pod = await runtime.run_pod(pod_of(shape, f"resident-{n}"))
            made = await runtime.create_container(pod.id, container_of(shape))
            await runtime.start_container(made.id)

    return populate


@contextlib.asynccontextmanager
async def _process(*command: str) -> AsyncIterator[list[str]]:
    """A process that says it is ready, and what it says after that word."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", *command,
        cwd=REPOSITORY, env=environment(), stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        said = (await process.stdout.readline()).decode().split()
        if said[:1] != ["ready"]:
            raise RuntimeError(f"{' '.join(command)} ended by itself, after saying {said}")
        yield said[1:]
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


@contextlib.asynccontextmanager
async def _attack(kind: str, port: int) -> AsyncIterator[None]:
    """What goes on meanwhile: an attack, or for comparison a load that does not touch us.

    Args:
        kind: of `bench.attacker`; with ``@`` and a server of `bench.bystander`, that is attacked
            in our place; ``burns`` and a number are programs that only compute.
        port: ours.
    """
    attack, _, server = kind.partition("@")
    async with contextlib.AsyncExitStack() as stack:
        if server:
            port = int((await stack.enter_async_context(_process("bench.bystander", server)))[0])
        if attack.startswith("burns"):
            for _ in range(int(attack.removeprefix("burns"))):
                await stack.enter_async_context(_process("bench.bystander", "burns"))
        elif attack:
            await stack.enter_async_context(_process("bench.attacker", attack, str(port)))
        yield


def _unverified() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


async def _probe(port: int, tls: bool) -> bool:
    """A liveness probe as the kubelet makes one."""
    try:
        async with asyncio.timeout(PROBE_TIMEOUT):
            reader, writer = await asyncio.open_connection(
                "127.0.0.1", port, ssl=_unverified() if tls else None
            )
            try:
                writer.write(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
                return (await reader.readline()).split()[1:2] == [b"200"]
            finally:
                writer.close()
    except (OSError, EOFError):
        return False


async def _probes(seen: Seen, port: int, tls: bool) -> None:
    while True:
        before = time.perf_counter()
        answered = await _probe(port, tls)
        seen.answered += answered
        seen.probes.append(time.perf_counter() - before if answered else PROBE_TIMEOUT)
        await asyncio.sleep(0.1)


def _look(seen: Seen, one: Bed) -> None:
    with contextlib.suppress(OSError):
        seen.rss = max(seen.rss, rss_bytes(one.pid))
        seen.fds = max(seen.fds, len(os.listdir(f"/proc/{one.pid}/fd")))


def _beside(one: Bed) -> float:
    """Seconds of CPU time of all threads but the first, which answers the runtime."""
    ticks = 0
    for thread in os.listdir(f"/proc/{one.pid}/task"):
        if int(thread) != one.pid:
            with contextlib.suppress(OSError):
                stat = Path(f"/proc/{one.pid}/task/{thread}/stat").read_text()
                user, system = stat.rpartition(") ")[2].split()[11:13]
                ticks += int(user) + int(system)
    return ticks / os.sysconf("SC_CLK_TCK")


async def _create(seen: Seen, one: Bed, name: str, shape: Shape) -> None:
    runtime = one.runtime
    pod = await runtime.run_pod(pod_of(shape, name))
    before = time.perf_counter()
    made = await runtime.create_container(pod.id, container_of(shape))
    took = time.perf_counter() - before
    seen.created += 1
    if made.message.linux.resources.cpu.cpus:
        seen.placed += 1
        seen.seconds.append(took)
    await runtime.start_container(made.id)
    await runtime.stop_container(made.id)
    await runtime.remove_pod(pod.id)


async def _synchronize(seen: Seen, one: Bed) -> None:
    """The runtime hangs up, and tells everything again."""
    await one.runtime.disconnect_plugins()
    try:
        await one.runtime.wait_for_plugin(limit=60)
        seen.synchronize.append(ms(one.last("Synchronize"), 0))
    except (TimeoutError, RuntimeError):
        seen.synchronize.append("failed")


async def _case(one: Bed, kind: str, rounds: int, shape: Shape, *, tls: bool, sync: bool) -> Seen:
    seen, closed = Seen(), len(one.runtime.closed)
    lines = one.log.read_bytes().count(b"\n")
    async with _attack(kind, one.port):
        probing = asyncio.ensure_future(_probes(seen, one.port, tls))
        gc.collect()
        gc.disable()
        try:
            begun, before = time.monotonic(), _beside(one)
            end = begun + LIMIT
            while seen.created < rounds and time.monotonic() < end:
                await _create(seen, one, f"new-{kind}-{seen.created}", shape)
                _look(seen, one)
                await asyncio.sleep(PAUSE)
            seen.beside = max(0.0, _beside(one) - before) / (time.monotonic() - begun)
            seen.dropped = len(one.runtime.closed) - closed
            # What our own creates said is not what an attacker made it say.
            seen.lines = one.log.read_bytes().count(b"\n") - lines - 3 * seen.created
            for _ in range(SYNCHRONIZATIONS if sync else 0):
                await _synchronize(seen, one)
                _look(seen, one)
        finally:
            gc.enable()
            probing.cancel()
    return seen


async def _cases(
    directory: Path,
    residents: int,
    kinds: tuple[str, ...],
    rounds: int,
    *,
    tls: bool,
    guarded: bool,
    checkout: Path = REPOSITORY,
) -> AsyncIterator[tuple[str, Seen]]:
    token, config = directory / "token", directory / "config.yaml"
    token.write_text(TOKEN)
    text = f"http: {{tokenFile: {token}}}\n" if guarded else "{}\n"
    if tls:
        command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt"]
        command += ["ec_paramgen_curve:P-256", "-nodes", "-days", "2", "-subj", "/CN=bench"]
        command += ["-keyout", str(directory / "key"), "-out", str(directory / "cert")]
        subprocess.run(command, check=True, capture_output=True)
        text = f"http: {{tlsCert: {directory / 'cert'}, tlsKey: {directory / 'key'}}}\n"
    config.write_text(text)
    async with bed(
        directory / "bed",
        MACHINES["64 CPUs, 2 NUMA nodes"](),
        more=(f"--config={config}",),
        http=True,
        before=_populate(residents, PLAIN),
        request_timeout=2 if residents < 1000 else 20,
        checkout=checkout,
    ) as one:
        while not await _probe(one.port, tls):
            await asyncio.sleep(0.2)
        for n in range(30):
            await _create(Seen(), one, f"warm-{n}", SHARED)
        for kind in kinds:
            seen = await _case(one, kind, rounds, SHARED, tls=tls, sync=residents >= 1000)
            yield kind, seen
            await asyncio.sleep(1)
            await one.runtime.wait_for_plugin(limit=60)


NAMES = {
    "": "quiet",
    "pipeline": "4 connections pipeline GET /healthz",
    "unauthorized": "4 connections pipeline requests without the token",
    "connections": "2,000 connections, half a request each",
    "slow": "128 connections, a byte each 8 s",
    "tls": "785 connections silent before the TLS handshake",
    "scrapers": "20 scrapers",
    "connections@drops": "control: the 2,000 at another server, which drops them",
    "connections@silent": "control: the 2,000 at another server, which keeps them",
    "tls@drops": "control: the 785 at another server, which drops them",
    "tls@silent": "control: the 785 at another server, which keeps them",
    "burns1": "control: a program that burns one CPU",
    "burns2": "control: two programs that burn one CPU each",
}
POLITE = ("ask200", "ask800", "unread", "unread-probes")
NAMES |= {
    "ask200": "200 clients ask GET /v1/status again when answered",
    "ask800": "800 clients do that",
    "unread": "800 pipeline GET /v1/status and never read",
    "unread-probes": "800 pipeline GET /healthz and never read",
    "ask200-tls": "200 clients ask GET /v1/status again when answered",
}
ATTACKS = ("", "pipeline", "unauthorized", "connections", "slow", "")
CONTROLS = ("connections@drops", "connections@silent", "burns1", "burns2")
"""The same load on the machine without a connection to us: what attackers and the kernel take of
the CPUs is theirs, and a plugin cannot give it back."""


HEAD = (
    "node", "meanwhile", "placed", "p50 ms", "p99 ms", "p99 × quiet", "dropped", "probes",
    "probe p50 ms", "probe p99 ms", "RSS MiB", "fds", "log lines", "HTTP CPUs", "Synchronize ms",
)  # fmt: skip


def _row(title: str, kind: str, seen: Seen, quiet: float) -> list[object]:
    """A line of the table; ``quiet`` is the p99 without an attack, if it is known."""
    row: list[object] = [title, NAMES[kind], f"{seen.placed} of {seen.created}"]
    if seen.seconds:
        s = summary(seen.seconds)
        row += [ms(s.p50, 2), ms(s.p99, 2), f"{s.p99 / (quiet or s.p99):.1f}"]
    else:
        row += ["", "", ""]
    probes = summary(seen.probes)
    row += [
        seen.dropped,
        f"{seen.answered} of {probes.count}",
        ms(probes.p50),
        ms(probes.p99),
        f"{seen.rss / 2**20:.0f}",
        seen.fds,
        max(0, seen.lines),
        f"{seen.beside:.2f}",
        " ".join(seen.synchronize),
    ]
    print(row, file=sys.stderr, flush=True)
    return row


async def measure(*, rounds: int = 400) -> str:
    rows = []
    beds = (
        ("100 containers", 100, False, (*ATTACKS, *CONTROLS, "")),
        ("100 containers, TLS", 100, True, ("", "tls", "", "tls@drops", "tls@silent", "")),
        ("10,000 containers", 10_000, False, ("", "scrapers", "")),
    )
    for title, residents, tls, kinds in beds:
        quiet, guarded = 0.0, residents < 1000 and not tls
        with scratch() as directory:
            cases = _cases(Path(directory), residents, kinds, rounds, tls=tls, guarded=guarded)
            async for kind, seen in cases:
                rows.append(_row(title, kind, seen, quiet))
                if seen.seconds:
                    quiet = quiet or summary(seen.seconds).p99
    return table(HEAD, rows)


async def measure_probes(*, rounds: int = 400) -> str:
    """Many polite clients and many that never read, and how long a probe waits meanwhile.

    ``BENCH_BEFORE`` is a checkout of an earlier version; it is measured first, with the same loads.
    """
    rows = []
    before = os.environ.get("BENCH_BEFORE")
    versions = {"before": Path(before)} if before else {}
    for version, checkout in (versions | {"now": REPOSITORY}).items():
        for tls in (False, True):
            kinds = ("", "ask200-tls", "") if tls else ("", *POLITE, "")
            title = f"{version}, TLS" if tls else version
            with scratch() as directory:
                async for kind, seen in _cases(
                    Path(directory), 100, kinds, rounds, tls=tls, guarded=False, checkout=checkout
                ):
                    rows.append(_row(title, kind, seen, 0.0))
    return table(HEAD, rows)
