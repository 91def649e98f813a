"""A client of the API server with the credentials of a pod: token and ca.crt are files.

The kubelet renews both: lightkube reads the token again when it is refused, and a changed ca.crt
gives a new client.
"""

from __future__ import annotations

import contextlib
import os
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Final

import httpx2
from lightkube import AsyncClient, KubeConfig
from lightkube.core.exceptions import ConfigError

TIMEOUT: Final = 10.0
"""Seconds for each step of a request; a silent server must not hold us for ever."""


def namespace(credentials: str) -> str:
    """The namespace of a pod's credentials; ``default`` where they do not say."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return Path(credentials, "namespace").read_text("ascii").strip() or "default"
    return "default"


class _Transport(httpx2.AsyncHTTPTransport):
    """Says who we are, and reads the clock of the answering server."""

    def __init__(
        self, context: ssl.SSLContext, user_agent: str, date: Callable[[str], object]
    ) -> None:
        super().__init__(verify=context, trust_env=False)
        self._user_agent, self._date = user_agent, date

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        request.headers["User-Agent"] = self._user_agent
        response = await super().handle_async_request(request)
        self._date(response.headers.get("Date", ""))
        return response


class Connection:
    """Keeps one client of the API server.

    Args:
        credentials: directory with ``token`` and ``ca.crt``, as a pod has it.
        user_agent: names us in its audit log.
        field_manager: names us in the objects that we write.
        date: is called with the header Date of each answer.
    """

    def __init__(
        self,
        credentials: str,
        *,
        user_agent: str,
        field_manager: str,
        date: Callable[[str], object] = lambda text: None,
    ) -> None:
        self._directory = Path(credentials)
        self._user_agent, self._field_manager, self._date = user_agent, field_manager, date
        self._client: AsyncClient | None = None
        self._context: ssl.SSLContext | None = None
        self._authority: tuple[int, int] = (0, 0)

    async def client(self) -> AsyncClient:
        """The client; another one after ca.crt changed.

        Raises:
            ConfigError: this is no pod, or its credentials cannot be used.
            OSError: ca.crt cannot be read.
        """
        file = self._directory / "ca.crt"
        status = os.stat(file)
        authority = (status.st_mtime_ns, status.st_ino)
        if self._client is None or authority != self._authority:
            await self.close()
            if not os.environ.get("KUBERNETES_SERVICE_HOST"):
                raise ConfigError("KUBERNETES_SERVICE_HOST is not set; in a pod it is")
            config = KubeConfig.from_service_account(self._directory).get()
            self._context = context = ssl.create_default_context(cafile=str(file))
            transport = _Transport(context, self._user_agent, self._date)
            self._client = AsyncClient(
                config,
                timeout=httpx2.Timeout(TIMEOUT),
                field_manager=self._field_manager,
                transport=transport,
                trust_env=False,
            )
            self._authority = authority
        return self._client

    async def close(self) -> None:
        """End the connections; the next `client` reads everything again."""
        client, self._client = self._client, None
        if client is not None:
            await client.close()


def unreachable(error: BaseException, directory: Path) -> str:
    """Why nothing came back, in a sentence that names what to look at.

    Args:
        error: what was raised.
        directory: of the credentials.
    """
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ssl.SSLCertVerificationError):
            return (
                f"the API server's certificate is not accepted: {cause.verify_message}; "
                f"{directory / 'ca.crt'} is of another cluster, or the clocks differ"
            )
        if isinstance(cause, ConfigError | FileNotFoundError):
            return f"no credentials: {cause}; expected token and ca.crt in {directory}"
        if isinstance(cause, ssl.SSLError) and not isinstance(error, httpx2.HTTPError):
            return f"{directory / 'ca.crt'} holds no certificate: {cause.reason or cause}"
        cause = cause.__cause__ or cause.__context__
    return f"no answer from the API server: {str(error) or type(error).__name__}"
