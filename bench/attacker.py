"""``python -m bench.attacker KIND PORT``: somebody who means harm to the HTTP side, as a process.

It says ``ready`` when the attack is under way, and goes on until it is ended. Every kind keeps at
it: what the server closes is opened again.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import sys

PIPELINED = 500
"""Requests written at once."""
RETRY = 0.05
"""Seconds until a connection that failed is tried again; otherwise we would measure ourselves."""
LIFETIME_S = 180
"""An attack ends by itself if nobody ends it."""


async def _read_all(reader: asyncio.StreamReader) -> None:
    with contextlib.suppress(OSError):
        while await reader.read(1 << 16):
            pass


async def flood(port: int, path: str) -> None:
    """Write requests as fast as they are taken, without waiting for an answer."""
    many = f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode() * PIPELINED
    while True:
        with contextlib.suppress(OSError):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            answers = asyncio.ensure_future(_read_all(reader))
            try:
                while not answers.done():
                    writer.write(many)
                    await writer.drain()
            finally:
                answers.cancel()
                writer.close()
        await asyncio.sleep(RETRY)


async def linger(port: int, first: bytes, pause: float) -> None:
    """Hold a connection open: say something, then a byte at a time."""
    while True:
        with contextlib.suppress(OSError):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            gone = asyncio.ensure_future(_read_all(reader))
            try:
                writer.write(first)
                while not gone.done():
                    await asyncio.wait({gone}, timeout=pause)
                    if first:
                        writer.write(b"x")
            finally:
                gone.cancel()
                writer.close()
        await asyncio.sleep(RETRY)


async def scrape(port: int, path: str, tls: ssl.SSLContext | None = None) -> None:
    """Ask, read the whole answer, ask again."""
    request = f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode()
    while True:
        with contextlib.suppress(OSError):
            reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=tls)
            try:
                writer.write(request)
                await _read_all(reader)
            finally:
                writer.close()


async def pipeline_unread(port: int, path: str) -> None:
    """Write requests as fast as they are taken, and never read an answer."""
    many = f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode() * PIPELINED
    loop = asyncio.get_running_loop()
    while True:
        with contextlib.suppress(OSError), socket.socket() as connection:
            connection.setblocking(False)
            await loop.sock_connect(connection, ("127.0.0.1", port))
            while True:
                await loop.sock_sendall(connection, many)
        await asyncio.sleep(RETRY)


async def attack(kind: str, port: int) -> None:
    match kind:
        case "pipeline":
            tasks = [flood(port, "/healthz") for _ in range(4)]
        case "unauthorized":
            tasks = [flood(port, "/v1/status") for _ in range(4)]
        case "connections":
            tasks = [linger(port, b"GET /heal", 3600) for _ in range(2000)]
        case "slow":
            tasks = [linger(port, b"GET /healthz HTTP/1.1\r\nX-Slow: ", 8) for _ in range(128)]
        case "tls":
            tasks = [linger(port, b"", 3600) for _ in range(785)]
        case "scrapers":
            tasks = [scrape(port, "/metrics") for _ in range(20)]
        case "ask200":
            tasks = [scrape(port, "/v1/status") for _ in range(200)]
        case "ask200-tls":
            tls = ssl.create_default_context()
            tls.check_hostname, tls.verify_mode = False, ssl.CERT_NONE
            tasks = [scrape(port, "/v1/status", tls) for _ in range(200)]
        case "ask800":
            tasks = [scrape(port, "/v1/status") for _ in range(800)]
        case "unread":
            tasks = [pipeline_unread(port, "/v1/status") for _ in range(800)]
        case "unread-probes":
            tasks = [pipeline_unread(port, "/healthz") for _ in range(800)]
        case _:
            raise SystemExit(f"unknown attack {kind!r}")
    running = asyncio.gather(*tasks)
    await asyncio.sleep(1)
    print("ready", flush=True)
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(running, LIFETIME_S)


if __name__ == "__main__":
    asyncio.run(attack(sys.argv[1], int(sys.argv[2])))
