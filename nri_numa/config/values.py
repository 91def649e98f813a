"""Parsers and checks of single values; `ValueError` says what was expected."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Final, TypeVar

from nri_numa import text
from nri_numa.model.cpuset import CPUSet, ListFormatError, NUMASet
from nri_numa.model.settings import CPUAmount

Check = Callable[[str], object]
_CPUOrNUMASet = TypeVar("_CPUOrNUMASet")

DAY_S: Final = 86_400.0
AUTO: Final = "auto"
MAX_SOCKET_PATH_BYTES: Final = 107
"""Bytes of a unix socket's path: ``sun_path`` of unix(7) without its terminating zero."""

_QUANTITY_PATTERN = re.compile(r"[0-9]+(?:\.[0-9]+)?(?:[kMGTPE]|[KMGTPE]i)?", re.ASCII)
"""Memory quantities: no sign, no exponent, no thousandths of a byte."""
_DURATION_PATTERN = re.compile(r"(?:[0-9]+(?:\.[0-9]+)?(?:ms|s|m|h))+", re.ASCII)
_DURATION_PART = re.compile(r"([0-9]+(?:\.[0-9]+)?)(ms|s|m|h)", re.ASCII)
_SECONDS_BY_UNIT = {
    "ms": Fraction(1, 1000),
    "s": Fraction(1),
    "m": Fraction(60),
    "h": Fraction(3600),
}
_PERCENT_PATTERN = re.compile(r"([0-9]{1,3}(?:\.[0-9]{1,3})?)%", re.ASCII)

# --- Amounts ------------------------------------------------------------------------------------


def parse_memory_bytes(value: str | int) -> int:
    """Parse bytes in Kubernetes' notation (``1536Mi``, ``2G``, ``1073741824``)."""
    if isinstance(value, int):
        if value < 0:
            raise ValueError(f"{value} is negative, expected bytes")
        return value
    if len(value) > 40 or not _QUANTITY_PATTERN.fullmatch(value):
        raise ValueError(f"{value[:40]!r} is no quantity, expected bytes or a text such as 512Mi")
    return int(text.parse_exact_quantity(value))


def page_bytes_of_type(resource: str) -> int:
    """Bytes of one page of a resource such as ``hugepages-2Mi``."""
    try:
        return text.page_bytes_of_resource(resource)
    except text.BadQuantity as error:
        raise ValueError(
            "unknown type, expected memory or huge pages such as hugepages-1Gi"
        ) from error


def parse_cpu_count_or_percent(value: str | int) -> CPUAmount:
    """Parse a number of CPUs or a percentage of them."""
    text = str(value)
    match = _PERCENT_PATTERN.fullmatch(text)
    if match is not None and float(match[1]) <= 100:
        return CPUAmount(percent=float(match[1]))
    if text.isascii() and text.isdigit() and len(text) <= 4 and int(text) <= CPUSet.LIMIT:
        return CPUAmount(int(text))
    raise ValueError(f"{text[:40]!r}, expected a number of CPUs, or a part of them such as 25%")


def parse_pool_floor(value: str | int) -> CPUAmount | None:
    """Parse the floor of the shared pool; None for ``auto``."""
    return None if value == AUTO else parse_cpu_count_or_percent(value)


def parse_duration(value: str | float) -> float:
    """Parse seconds, given as a number or a text such as ``1m30s`` or ``250ms``."""
    if isinstance(value, str):
        if value.isascii() and value.isdigit() and len(value) <= 10:
            return float(value)
        if len(value) > 40 or not _DURATION_PATTERN.fullmatch(value):
            raise ValueError(
                f"{value[:40]!r} is no duration, expected seconds or a text such as 30s"
            )
        parts = _DURATION_PART.findall(value)
        return float(sum(Fraction(number) * _SECONDS_BY_UNIT[unit] for number, unit in parts))
    if not 0 <= value < float("inf"):
        raise ValueError(f"{value} is no duration, expected 0 or more seconds")
    return float(value)


def build_duration_check(
    min_s: float, max_s: float = float("inf")
) -> Callable[[str | float], object]:
    """Build a check of durations in seconds."""

    def check_duration(value: str | float) -> None:
        if not min_s <= parse_duration(value) <= max_s:
            limit = f"to {max_s:g}s" if max_s < float("inf") else "or more"
            raise ValueError(f"{value}, expected {min_s:g}s {limit}")

    return check_duration


# --- Lists of ids -------------------------------------------------------------------------------


def parse_cpus(value: str | int) -> CPUSet:
    """Parse a CPU list; YAML reads a list of one id as a number."""
    return _parse_set(CPUSet.parse, value)


def parse_numa_nodes(value: str | int) -> NUMASet:
    """Parse a list of NUMA nodes or memory tiers."""
    return _parse_set(NUMASet.parse, value)


def _parse_set(parse: Callable[[str], _CPUOrNUMASet], value: str | int) -> _CPUOrNUMASet:
    try:
        return parse(str(value))
    except ListFormatError as error:
        raise ValueError(f"{error}, expected a kernel list such as 0-3,8") from error


# --- Paths and addresses ------------------------------------------------------------------------


def build_absolute_path_check(max_len: int = 4095, *, empty: bool = False, note: str = "") -> Check:
    """Build a check of absolute paths; ``max_len`` is in bytes, ``empty`` allows the empty text."""
    limit = f" of at most {max_len} bytes{note}" if max_len != 4095 else ""

    def check_absolute_path(path: str) -> None:
        if not (empty and not path) and not (
            path.startswith("/") and "\0" not in path and len(path.encode()) <= max_len
        ):
            raise ValueError(f"{path[:120]!r}, expected an absolute path{limit}")

    return check_absolute_path


def check_absolute_paths(paths: Sequence[str]) -> None:
    """Check up to 8 absolute paths."""
    if len(paths) > 8:
        raise ValueError(f"{len(paths)} directories, expected at most 8")
    for path in paths:
        build_absolute_path_check()(path)


def check_unix_socket_address(value: str) -> None:
    """Check a unix socket's address as CRI clients write it, with or without ``unix://``."""
    build_absolute_path_check(MAX_SOCKET_PATH_BYTES, note=", with or without unix:// in front")(
        value.removeprefix("unix://")
    )


def split_address(address: str) -> tuple[str, int] | None:
    """Split ``host:port`` or ``[IPv6]:port`` into host and port; None for ``off``.

    An empty host means every interface.
    """
    if address == "off":
        return None
    host, colon, port_text = address.rpartition(":")
    problem = f"{address!r} is no address, expected host:port, [IPv6]:port or off"
    if not colon or not (port_text.isascii() and port_text.isdigit()) or len(port_text) > 5:
        raise ValueError(problem)
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ValueError(problem)
    port = int(port_text)
    if port > 65535:
        raise ValueError(f"port {port} is above 65535")
    if any(c.isspace() or c in "[]/" for c in host):
        raise ValueError(problem)
    return host, port


def is_loopback(host: str) -> bool:
    """True if only this machine can reach a listener on ``host``."""
    return host in ("localhost", "::1") or bool(re.fullmatch(r"127(\.[0-9]{1,3}){3}", host))


def check_prometheus_url(url: str) -> None:
    """Check the address of a Prometheus server; it may be empty."""
    if url and not url.startswith(("http://", "https://")):
        raise ValueError(f"{url[:80]!r}, expected http:// or https://")


def check_node_page_url_template(url: str) -> None:
    """Check the address of a node's page, which names the node; it may be empty."""
    check_prometheus_url(url)
    if url and "{node}" not in url and "{address}" not in url:
        raise ValueError(f"{url[:80]!r} names no node, expected {{node}} or {{address}} in it")


# --- Names --------------------------------------------------------------------------------------

_DNS_LABEL_PATTERN = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_DNS_NAME = re.compile(rf"{_DNS_LABEL_PATTERN}(\.{_DNS_LABEL_PATTERN})*")
_DRIVER_NAME_PATTERN = re.compile(rf"{_DNS_LABEL_PATTERN}(\.{_DNS_LABEL_PATTERN})+")
_MAX_DRIVER_NAME_CHARS = 63
"""Source: kubernetes ``pkg/apis/resource/validation`` (DriverNameMaxLength)."""


def check_node_name(name: str) -> None:
    """Check the name of a Node; it may be empty."""
    if name and (len(name) > 253 or not _DNS_NAME.fullmatch(name)):
        raise ValueError(
            f"{name[:80]!r}, expected a node's name as Kubernetes has it: a DNS name in lower case "
            "such as worker-7.example.org"
        )


def check_annotation_prefix(prefix: str) -> None:
    """Check the prefix of annotations."""
    if len(prefix) > 253 or not _DNS_NAME.fullmatch(prefix):
        raise ValueError(
            f"{prefix[:80]!r}, expected a DNS name such as numa.kubernetes.io (lower case, no "
            "slash)"
        )


def check_driver_name(driver: str) -> None:
    """Check the name of a DRA driver."""
    if len(driver) > _MAX_DRIVER_NAME_CHARS or not _DRIVER_NAME_PATTERN.fullmatch(driver):
        raise ValueError(
            f"{driver[:120]!r}, expected a DNS name in lower case with a dot, of at most "
            f"{_MAX_DRIVER_NAME_CHARS} characters, such as dra.example.com"
        )


def parse_plugin_index(index: str | int) -> str:
    """Parse the plugin index: two digits, as NRI requires."""
    digits = f"{index:02d}" if isinstance(index, int) else index
    if not re.fullmatch(r"[0-9]{2}", digits, re.ASCII):
        raise ValueError(f"{digits[:20]!r}, expected two digits from 00 to 99")
    return digits


_RESOURCE_NAME_PART_PATTERN = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?", re.ASCII)
_QUOTA_RESOURCE_PREFIX = "requests."
"""ResourceQuota puts it before the name, which must be valid with it too."""
_MAX_RESOURCE_PREFIX_CHARS = 253 - len(_QUOTA_RESOURCE_PREFIX)


def check_extended_resource(name: str) -> None:
    """Check the name of an extended resource.

    Source: kubernetes ``pkg/apis/core/v1/helper/helpers.go`` (IsExtendedResourceName) and
    ``staging/src/k8s.io/apimachinery/pkg/util/validation``.
    """
    prefix, slash, local_name = name.partition("/")
    value, hint = repr(name[:120]), "such as example.com/exclusive-cpu"
    if not slash:
        raise ValueError(f"{value} has no prefix, expected a DNS name, a slash and a name, {hint}")
    if "kubernetes.io/" in name:
        raise ValueError(
            f"{value} is below kubernetes.io, which the API server keeps for Kubernetes; expected "
            f"a DNS name of yours as prefix, {hint}"
        )
    if name.startswith(_QUOTA_RESOURCE_PREFIX):
        raise ValueError(
            f"{value} begins with {_QUOTA_RESOURCE_PREFIX}, which is the language of quotas; "
            "expected another"
        )
    if len(prefix) > _MAX_RESOURCE_PREFIX_CHARS or not _DNS_NAME.fullmatch(prefix):
        raise ValueError(
            f"{value}: the prefix is no DNS name (lower case, at most {_MAX_RESOURCE_PREFIX_CHARS} "
            f"characters), expected one {hint}"
        )
    if len(local_name) > 63 or not _RESOURCE_NAME_PART_PATTERN.fullmatch(local_name):
        raise ValueError(
            f"{value}: after the slash, expected up to 63 letters, digits, -, _ and ., a letter or "
            f"digit at both ends, {hint}"
        )
