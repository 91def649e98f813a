"""Asks a running agent over its HTTP API, for commands and for a shell that completes names."""

from __future__ import annotations

import http.client
import json
import os
import re
import socket
import threading
from collections.abc import Callable, Iterable
from contextlib import closing, suppress
from functools import partial
from typing import Any, Final, NamedTuple
from urllib.parse import quote

import click

from nri_numa.cli.common import Failure, InputError, Unreachable, load_command_config
from nri_numa.text import escape_unprintable

AGENT_REQUEST_TIMEOUT_S: Final = 5.0
MAX_AGENT_ANSWER_BYTES: Final = 64 << 20


class UnknownToAgent(Failure):
    """The agent does not know the pod or container; exit code 1."""


class ContainerName(NamedTuple):
    """One container that the agent knows."""

    namespace: str
    pod: str
    container: str


class _SocketConnection(http.client.HTTPConnection):
    """A connection to a unix socket."""

    def __init__(self, path: str, *, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


class AgentClient:
    """One agent's API, at ``host:port``, a URL with http or https, or ``unix:///path``.

    The timeout is for each step of a request, in seconds.

    Raises:
        InputError: the address is none.
    """

    def __init__(
        self,
        address: str,
        token: str = "",
        ca_file: str = "",
        *,
        timeout: float = AGENT_REQUEST_TIMEOUT_S,
    ) -> None:
        scheme, _, rest = address.rpartition("://")
        if address.startswith("/"):
            scheme, rest = "unix", address
        self._token = token
        self._is_socket = scheme == "unix"
        self.address = rest if self._is_socket else rest.rstrip("/")
        _check_address(address, scheme, self.address)
        if self._is_socket:
            self._connect: Callable[[], http.client.HTTPConnection] = partial(
                _SocketConnection, rest, timeout=timeout
            )
        elif scheme == "https":
            import ssl

            try:
                context = ssl.create_default_context(cafile=ca_file or None)
            except OSError as error:
                raise InputError(f"--ca-file {ca_file}: {error.strerror or error}") from error
            self._connect = partial(
                http.client.HTTPSConnection, self.address, timeout=timeout, context=context
            )
        else:
            self._connect = partial(http.client.HTTPConnection, self.address, timeout=timeout)

    @property
    def on_this_node(self) -> bool:
        """Whether the agent is asked over loopback or a socket of this node."""
        from nri_numa.config import is_loopback, split_address

        if self._is_socket:
            return True
        address = split_address(self.address)
        return address is not None and is_loopback(address[0])

    def get_document(self, path: str) -> Any:
        """The document of an answer.

        Raises:
            Unreachable: nothing answers, or another program.
            UnknownToAgent: the agent does not know it.
            Failure: the agent refuses.
        """
        headers = {"Accept": "application/json"}
        if self._token:
            headers["Authorization"] = f"Bearer {self._token}"
        try:
            with closing(self._connect()) as connection:
                connection.request("GET", path, headers=headers)
                response = connection.getresponse()
                body = response.read(MAX_AGENT_ANSWER_BYTES)
        except (OSError, http.client.HTTPException, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            if getattr(error, "reason", "") == "WRONG_VERSION_NUMBER":
                raise Unreachable(
                    f"{self.address} speaks HTTP and not HTTPS: use http://"
                ) from error
            raise Unreachable(
                f"no answer from {self.address}: {escape_unprintable(reason)}\n"
                "  Is the agent running (systemctl status nri-numa), with http on?\n"
                "  Another address is given with --api, NRI_NUMA_API or the configuration."
            ) from error
        if not response.getheader("Server", "").startswith("nri-numa"):
            raise Unreachable(f"{self.address} is served by another program, not by nri-numa")
        try:
            document = json.loads(body)
        except ValueError as error:
            raise Unreachable(f"{self.address} did not answer with JSON") from error
        if response.status >= 400 and "error" in document:
            if isinstance(document["error"], str):  # as publisher, controller and extender say it
                raise Unreachable(f"{self.address} is served by nri-numa, but not by its agent")
            if response.status == 401:
                raise Failure(f"{self.address} wants a token: --token-file")
            message = escape_unprintable(str(document["error"].get("message", "")))
            raise (UnknownToAgent if response.status == 404 else Failure)(message)
        return document

    def container_names(self) -> list[ContainerName]:
        """The containers that run here or were refused lately, in the order of their names."""
        listed = [
            *self.get_document("/v1/assignments")["containers"],
            *self.get_document("/v1/refusals")["refusals"],
        ]
        return sorted(
            {ContainerName(one["namespace"], one["pod"], one["container"]) for one in listed}
        )


def _check_address(given: str, scheme: str, rest: str) -> None:
    """Refuse an ``--api`` that names no place to ask.

    Raises:
        InputError: it is none, with what was expected.
    """
    from nri_numa.config import split_address

    expected = "expected host:port, http://host:port, https://host:port or unix:///path"
    if scheme == "unix":
        if not rest.startswith("/"):
            raise InputError(f"--api {escape_unprintable(given)}: no absolute path, {expected}")
        return
    if scheme not in ("", "http", "https"):
        raise InputError(
            f"--api {escape_unprintable(given)}: unknown scheme {escape_unprintable(scheme)}, "
            f"{expected}"
        )
    try:
        address = split_address(rest)
    except ValueError as error:
        raise InputError(
            f"--api {escape_unprintable(given)}: {escape_unprintable(str(error))}"
        ) from error
    if address is None or not address[0]:
        raise InputError(f"--api {escape_unprintable(given)}: no host, {expected}")


def quote_path_segment(text: str) -> str:
    """``text`` as one segment of a path."""
    try:
        return quote(text, safe="")
    except UnicodeEncodeError as error:
        raise InputError(f"{escape_unprintable(text)[:100]} is no name: expected UTF-8") from error


def new_agent_client(
    api: str | None,
    token_file: str | None,
    ca_file: str | None,
    config: str | None = None,
    *,
    timeout: float = AGENT_REQUEST_TIMEOUT_S,
) -> AgentClient:
    """The client for the given `api_options`, or for what the configuration says."""
    token = token_file or ""
    if not api:
        from nri_numa import config as configuration

        section = load_command_config(config or os.environ.get("NRI_NUMA_CONFIG")).http
        address = configuration.split_address(section.address)
        if address is None and not section.socket:
            raise Unreachable(
                "http.address is off and http.socket is empty, so the agent cannot be asked"
            )
        host, port = address or ("", 0)
        if host in ("", "0.0.0.0"):  # noqa: S104  # compared, not listened on
            host = "127.0.0.1"
        elif host == "::":
            host = "::1"
        shown = f"[{host}]" if ":" in host else host
        api = f"{'https' if section.tls_cert else 'http'}://{shown}:{port}"
        if address is None:
            api = f"unix://{section.socket}"
        token = token or section.token_file
    return AgentClient(api, _read_token(token), ca_file or "", timeout=timeout)


def _read_token(path: str) -> str:
    if not path:
        return ""
    try:
        with open(path) as file:
            token = file.read(4096).strip()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise InputError(
            f"token file {path}: cannot be read: {why}; expected the API's token"
        ) from error
    if not token.isprintable() or not token.isascii():
        raise InputError(f"token file {path}: holds something that is no token")
    return token


# --- Completion of pods, namespaces and containers with what the live agent knows -----------------
# A shell waits for it with the cursor standing still: whatever is wrong, the answer is there after
# `COMPLETION_TIMEOUT_S` seconds, and it is empty.


COMPLETION_TIMEOUT_S: Final = 2.0
"""Seconds that a shell waits at most."""
_PLAIN_NAME_PATTERN: Final = re.compile(r"[a-z0-9][a-z0-9._-]{0,252}", re.ASCII)
"""Names as Kubernetes allows them; others are not put into a command line."""


def list_containers(ctx: click.Context) -> list[ContainerName]:
    """The containers that the agent knows, in the order of their names; empty without an agent."""
    found: list[ContainerName] = []

    def query_agent() -> None:
        given = [ctx.params.get(n) for n in ("api", "token_file", "ca_file", "config_path")]
        with suppress(Exception):  # whatever it is, a shell shows nothing of it
            names = new_agent_client(*given, timeout=COMPLETION_TIMEOUT_S).container_names()
            found.extend(one for one in names if all(map(_PLAIN_NAME_PATTERN.fullmatch, one)))

    # A thread that is left behind: a name that is resolved, or an answer that comes byte by byte,
    # keeps to no time limit of a socket.
    request = threading.Thread(target=query_agent, daemon=True)
    request.start()
    request.join(COMPLETION_TIMEOUT_S)
    return [] if request.is_alive() else found


def _completion_callback(
    choose: Callable[[click.Context, list[ContainerName], str], Iterable[str]],
) -> Callable[[click.Context, click.Parameter, str], list[str]]:
    """A function as click wants it of one that chooses among all names."""

    def complete_name(ctx: click.Context, _parameter: click.Parameter, begun: str) -> list[str]:
        found = dict.fromkeys(choose(ctx, list_containers(ctx), begun))
        return [name for name in found if name.startswith(begun)]

    return complete_name


@_completion_callback
def complete_namespaces(
    _ctx: click.Context, found: list[ContainerName], _begun: str
) -> Iterable[str]:
    """Of all namespaces with containers here."""
    return (one.namespace for one in found)


@_completion_callback
def complete_pods(ctx: click.Context, found: list[ContainerName], _begun: str) -> Iterable[str]:
    """Of pods by their name alone, of the namespace that is given."""
    within = ctx.params.get("namespace")
    return (one.pod for one in found if within in (None, one.namespace))


@_completion_callback
def complete_namespaced_pods(
    ctx: click.Context, found: list[ContainerName], begun: str
) -> Iterable[str]:
    """Of pods as ``explain`` takes them: NAMESPACE/POD, or POD behind ``-n`` or once begun."""
    within = ctx.params.get("namespace")
    if within is None:
        yield from (f"{one.namespace}/{one.pod}" for one in found)
    if within is not None or begun:
        yield from (one.pod for one in found if within in (None, one.namespace))


@_completion_callback
def complete_containers(
    ctx: click.Context, found: list[ContainerName], _begun: str
) -> Iterable[str]:
    """Of the containers of the pod that stands before it."""
    namespace, slash, pod = str(ctx.params.get("pod") or "").partition("/")
    within = namespace if slash else ctx.params.get("namespace")
    for one in found:
        if one.pod == (pod if slash else namespace) and within in (None, one.namespace):
            yield one.container
