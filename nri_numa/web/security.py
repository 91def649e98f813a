"""Authentication of requests: bearer token, certificate, and the Host header."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import os
import re
import time
from typing import TYPE_CHECKING, Final

from nri_numa.config.values import is_loopback
from nri_numa.errors import ConfigError
from nri_numa.observe.logs import get_logger
from nri_numa.observe.reports import ReportOnce
from nri_numa.web.protocol import APIError, HTTPRequest

if TYPE_CHECKING:
    import ssl

log = get_logger("http")

_HOST_HEADER_PATTERN: Final = re.compile(
    r"(?:\[(?P<ipv6>[0-9a-f:.]+)\]|(?P<name>[^\[\]:]*))(?::[0-9]*)?"
)
"""``uri-host [ ":" port ]`` of RFC 9110, section 7.2."""


class TokenFile:
    """Bearer token that is read again when its file changes.

    ``setting`` is the section of the configuration. A file that is empty or cannot be read at the
    start is a `ConfigError`.
    """

    def __init__(self, path: str, *, setting: str = "http") -> None:
        self._path, self._setting = path, setting
        self._version: tuple[int, int, int] | None = None
        self._token = b""
        if problem := self._refresh_token():
            raise ConfigError("configuration", [f"{setting}.tokenFile: {problem}"])

    def check_request_token(self, request: HTTPRequest) -> None:
        """Raise `APIError` unless the Authorization header carries the token.

        If the file becomes unreadable, the last token stays in force.
        """
        self._refresh_token()
        scheme, _, token = request.header_value(b"authorization").partition(b" ")
        if scheme.lower() != b"bearer" or not hmac.compare_digest(token.strip(), self._token):
            raise APIError(
                401,
                "Unauthorized",
                "expected the header Authorization: Bearer TOKEN with the token of "
                f"{self._setting}.tokenFile",
                [("WWW-Authenticate", 'Bearer realm="nri-numa"')],
            )

    def _refresh_token(self) -> str:
        try:
            info = os.stat(self._path)
            version = (info.st_mtime_ns, info.st_size, info.st_ino)
            if version == self._version:
                return ""
            with open(self._path, "rb") as file:
                token = file.read(4096).strip()
        except OSError as error:
            return f"{self._path} cannot be read: {error.strerror or error}"
        if len(token) < 16:
            return f"{self._path} holds fewer than 16 characters, expected a token"
        self._version, self._token = version, token
        return ""


class Certificate:
    """Certificate of the server, loaded again when its files change.

    ``client_ca`` certifies clients; it is empty if no client certificate is expected. ``setting``
    is the section of the configuration, for the `ConfigError` about unusable files.
    """

    context: ssl.SSLContext

    def __init__(self, cert: str, key: str, client_ca: str = "", *, setting: str = "http") -> None:
        self._files = (cert, key, *((client_ca,) if client_ca else ()))
        self._mtimes: tuple[int, ...] = ()
        self._problems = ReportOnce(log)
        try:
            self._refresh_context()
        except OSError as error:
            problem = f"{setting}.tlsCert: {' and '.join(self._files)} cannot be used: {error}"
            raise ConfigError("configuration", [problem]) from error

    def current_context(self) -> ssl.SSLContext:
        """Return the context for the next connection; changed files are loaded if usable."""
        problem = ""
        try:
            self._refresh_context()
        except OSError as error:  # such as an unfinished rotation: the old pair stays in force
            problem = f"{self._files[0]}: {error}"
        self._problems.report("certificate not renewed", problem)
        return self.context

    def certificate_sha256(self) -> bytes:
        """Return the certificate's SHA-256; `OSError` or `ValueError` if the file has none."""
        import ssl

        with open(self._files[0], encoding="ascii") as file:
            text = file.read()
        header, footer = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"
        pem = text[text.index(header) : text.index(footer)] + footer
        return hashlib.sha256(ssl.PEM_cert_to_DER_cert(pem)).digest()

    def expired_problem(self) -> str:
        """Return a problem if the certificate has expired, else empty; it is served anyway."""
        seconds = certificate_seconds_left(self._files[0], time.time())
        if seconds is None or seconds >= 0:
            return ""
        return f"{self._files[0]} expired {int(-seconds // 86400)} days ago, clients will refuse it"

    def _refresh_context(self) -> None:
        import ssl

        mtimes = tuple(os.stat(path).st_mtime_ns for path in self._files)
        if mtimes == self._mtimes:
            return
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.load_cert_chain(*self._files[:2])
        for authority in self._files[2:]:
            context.load_verify_locations(authority)
            # Probes and scrapers have none; routes that need one reject them.
            context.verify_mode = ssl.CERT_OPTIONAL
        self.context, self._mtimes = context, mtimes


def certificate_seconds_left(cert: str, now: float) -> float | None:
    """Return the seconds until the first certificate of a PEM file expires; None if unknown."""
    import ssl

    try:
        # The standard library has no public way to read a certificate from a file.
        decoded = ssl._ssl._test_decode_cert(cert)  # type: ignore[attr-defined]
        return ssl.cert_time_to_seconds(decoded["notAfter"]) - now
    except (AttributeError, KeyError, ValueError, ssl.SSLError):
        return None


def is_expected_host(header: bytes, configured: str) -> bool:
    """Return False if a loopback listener is addressed by a foreign name.

    A web page can make a browser send requests to 127.0.0.1 under the page's own name (DNS
    rebinding); such a request has that name in its Host header. Addresses and ``localhost``
    cannot be rebound.
    """
    if not is_loopback(configured):
        return True
    match = _HOST_HEADER_PATTERN.fullmatch(header.decode("latin-1").lower())
    if match is None:
        return False
    numbers, name = match["ipv6"], match["name"]
    if name in ("", "localhost", configured.lower()):
        return True
    try:
        ipaddress.IPv4Address(name) if numbers is None else ipaddress.IPv6Address(numbers)
    except ValueError:
        return False
    return True
