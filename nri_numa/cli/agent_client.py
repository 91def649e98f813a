"""Client of a running agent's HTTP API, for commands and for the completion of names in a shell."""

from __future__ import annotations

import http.client
import json
import os
import re
import socket
import ssl
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
_LOOPBACK_BY_WILDCARD: Final = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104


class UnknownToAgent(Failure):
    """A pod or container that the agent does not know; exit code 1."""


class ContainerName(NamedTuple):
    """Name of one container that the agent knows."""

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
    """Client of an agent's API at ``host:port``, a URL with http or https, or ``unix:///path``.

    The timeout is for each step of a request, in seconds.

    Raises:
        InputError: the address is invalid.
    """

    def __init__(
        self,
        address: str,
        token: str = "",
        ca_file: str = "",
        *,
        timeout: float = AGENT_REQUEST_TIMEOUT_S,
    ) -> None:
        scheme, _, target = address.rpartition("://")
        if address.startswith("/"):
            scheme, target = "unix", address
        self._token = token
        self._is_socket = scheme == "unix"
        self.address = target if self._is_socket else target.rstrip("/")
        if problem := _address_problem(scheme, self.address):
            raise InputError(f"--api {escape_unprintable(address)}: {escape_unprintable(problem)}")
        kind: type[http.client.HTTPConnection] = http.client.HTTPConnection
        options: dict[str, Any] = {"timeout": timeout}
        if self._is_socket:
            kind = _SocketConnection
        elif scheme == "https":
            kind = http.client.HTTPSConnection
            try:
                options["context"] = ssl.create_default_context(cafile=ca_file or None)
            except OSError as error:
                raise InputError(f"--ca-file {ca_file}: {error.strerror or error}") from error
        self._connect = partial(kind, self.address, **options)

    @property
    def on_this_node(self) -> bool:
        """True if the agent's address is loopback or a socket of this node."""
        from nri_numa.config import is_loopback, split_address

        if self._is_socket:
            return True
        address = split_address(self.address)
        return address is not None and is_loopback(address[0])

    def get_document(self, path: str) -> Any:
        """Get the document at a path.

        Raises:
            Unreachable: nothing answers, or another program.
            UnknownToAgent: the agent does not know the pod or container.
            Failure: the agent rejects the request.
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
                text = f"{self.address} speaks HTTP and not HTTPS: use http://"
                raise Unreachable(text) from error
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
            if isinstance(document["error"], str):  # as publisher, controller and extender answer
                raise Unreachable(f"{self.address} is served by nri-numa, but not by its agent")
            if response.status == 401:
                raise Failure(f"{self.address} requires a token: --token-file")
            message = escape_unprintable(str(document["error"].get("message", "")))
            raise (UnknownToAgent if response.status == 404 else Failure)(message)
        return document

    def container_names(self) -> list[ContainerName]:
        """Return the containers that run here or were rejected lately, sorted by name."""
        listed = [
            *self.get_document("/v1/assignments")["containers"],
            *self.get_document("/v1/rejections")["rejections"],
        ]
        return sorted({ContainerName(c["namespace"], c["pod"], c["container"]) for c in listed})


def _address_problem(scheme: str, target: str) -> str:
    """Return what is wrong with an address, and what was expected; empty if it is valid."""
    from nri_numa.config import split_address

    hint = "expected host:port, http://host:port, https://host:port or unix:///path"
    if scheme == "unix":
        return "" if target.startswith("/") else f"no absolute path, {hint}"
    if scheme not in ("", "http", "https"):
        return f"unknown scheme {scheme}, {hint}"
    try:
        address = split_address(target)
    except ValueError as error:
        return str(error)
    return "" if address is not None and address[0] else f"no host, {hint}"


def quote_path_segment(text: str) -> str:
    """Quote ``text`` as one segment of a path."""
    try:
        return quote(text, safe="")
    except UnicodeEncodeError as error:
        name = escape_unprintable(text)[:100]
        raise InputError(f"{name} is not a name, expected UTF-8") from error


def new_agent_client(
    api: str | None,
    token_file: str | None,
    ca_file: str | None,
    config: str | None = None,
    *,
    timeout: float = AGENT_REQUEST_TIMEOUT_S,
) -> AgentClient:
    """Return the client for the `api_options`, or for the configured address."""
    token = token_file or ""
    if not api:
        from nri_numa import config as configuration

        section = load_command_config(config or os.environ.get("NRI_NUMA_CONFIG")).http
        address = configuration.split_address(section.address)
        if address is None and not section.socket:
            raise Unreachable(
                "http.address is off and http.socket is empty, so the agent cannot be asked"
            )
        api = f"unix://{section.socket}"
        if address is not None:
            host = _LOOPBACK_BY_WILDCARD.get(address[0], address[0])
            host_text = f"[{host}]" if ":" in host else host
            api = f"{'https' if section.tls_cert else 'http'}://{host_text}:{address[1]}"
        token = token or section.token_file
    return AgentClient(api, _read_token(token), ca_file or "", timeout=timeout)


def _read_token(path: str) -> str:
    if not path:
        return ""
    try:
        with open(path) as file:
            token = file.read(4096).strip()
    except (OSError, UnicodeDecodeError) as error:
        problem = getattr(error, "strerror", None) or error
        raise InputError(
            f"token file {path}: cannot be read: {problem}; expected the API's token"
        ) from error
    if not token.isprintable() or not token.isascii():
        raise InputError(f"token file {path}: does not hold a token")
    return token


# --- Completion of pods, namespaces and containers with the names of the live agent ---------------
# A shell blocks while it waits: after `COMPLETION_TIMEOUT_S` seconds, or on any failure, the answer
# is empty.


COMPLETION_TIMEOUT_S: Final = 2.0
"""Maximum seconds that a shell waits."""
_PLAIN_NAME_PATTERN: Final = re.compile(r"[a-z0-9][a-z0-9._-]{0,252}", re.ASCII)
"""Names that Kubernetes allows; others are not put into a command line."""


def list_containers(ctx: click.Context) -> list[ContainerName]:
    """List the containers that the agent knows, sorted by name; empty without an agent."""
    containers: list[ContainerName] = []

    def query_agent() -> None:
        options = [ctx.params.get(n) for n in ("api", "token_file", "ca_file", "config_path")]
        with suppress(Exception):  # a shell cannot show it
            names = new_agent_client(*options, timeout=COMPLETION_TIMEOUT_S).container_names()
            containers.extend(c for c in names if all(map(_PLAIN_NAME_PATTERN.fullmatch, c)))

    # The thread may outlive this function: a socket's timeout limits neither the resolution of a
    # name nor an answer that arrives byte by byte.
    request = threading.Thread(target=query_agent, daemon=True)
    request.start()
    request.join(COMPLETION_TIMEOUT_S)
    return [] if request.is_alive() else containers


def _completion_callback(
    choose: Callable[[click.Context, list[ContainerName], str], Iterable[str]],
) -> Callable[[click.Context, click.Parameter, str], list[str]]:
    """Turn a function that selects names into a completion callback of click."""

    def complete_name(ctx: click.Context, _parameter: click.Parameter, prefix: str) -> list[str]:
        names = dict.fromkeys(choose(ctx, list_containers(ctx), prefix))
        return [name for name in names if name.startswith(prefix)]

    return complete_name


@_completion_callback
def complete_namespaces(
    _ctx: click.Context, names: list[ContainerName], _prefix: str
) -> Iterable[str]:
    """Complete namespaces that have containers here."""
    return (c.namespace for c in names)


@_completion_callback
def complete_pods(ctx: click.Context, names: list[ContainerName], _prefix: str) -> Iterable[str]:
    """Complete pods by name alone, in the namespace of ``-n``."""
    namespace = ctx.params.get("namespace")
    return (c.pod for c in names if namespace in (None, c.namespace))


@_completion_callback
def complete_namespaced_pods(
    ctx: click.Context, names: list[ContainerName], prefix: str
) -> Iterable[str]:
    """Complete pods for ``explain``: NAMESPACE/POD, or POD after ``-n`` or with a prefix."""
    namespace = ctx.params.get("namespace")
    if namespace is None:
        yield from (f"{c.namespace}/{c.pod}" for c in names)
    if namespace is not None or prefix:
        yield from (c.pod for c in names if namespace in (None, c.namespace))


@_completion_callback
def complete_containers(
    ctx: click.Context, names: list[ContainerName], _prefix: str
) -> Iterable[str]:
    """Complete the containers of the preceding pod."""
    namespace, slash, pod = str(ctx.params.get("pod") or "").partition("/")
    pod_namespace = namespace if slash else ctx.params.get("namespace")
    for c in names:
        if c.pod == (pod if slash else namespace) and pod_namespace in (None, c.namespace):
            yield c.container
