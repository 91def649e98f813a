"""What single values mean: parsed, and refused with what was expected (`ValueError`)."""

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
"""How people write memory: no sign, no exponent, no thousandths of a byte."""
_DURATION_PATTERN = re.compile(r"(?:[0-9]+(?:\.[0-9]+)?(?:ms|s|m|h))+", re.ASCII)
_DURATION_PART = re.compile(r"([0-9]+(?:\.[0-9]+)?)(ms|s|m|h)", re.ASCII)
_SECONDS_BY_UNIT = {
    "ms": Fraction(1, 1000),
    "s": Fraction(1),
    "m": Fraction(60),
    "h": Fraction(3600),
}
_PERCENT_PATTERN = re.compile(r"([0-9]{1,3}(?:\.[0-9]{1,3})?)%", re.ASCII)
_MAX_CPUS = 8192  # of the largest kernels, as in `nri_numa.model.cpuset`

# --- Amounts ------------------------------------------------------------------------------------


def parse_memory_bytes(value: str | int) -> int:
    """Bytes of a memory quantity in Kubernetes' notation (``1536Mi``, ``2G``, ``1073741824``)."""
    if isinstance(value, int):
        if value < 0:
            raise ValueError(f"{value} is negative, expected bytes")
        return value
    if len(value) > 40 or not _QUANTITY_PATTERN.fullmatch(value):
        raise ValueError(f"{value[:40]!r} is no quantity, expected bytes or a text such as 512Mi")
    return int(text.parse_exact_quantity(value))


def page_bytes_of_type(resource: str) -> int:
    """Bytes of one page of ``hugepages-2Mi`` and the like."""
    try:
        return text.page_bytes_of_resource(resource)
    except text.BadQuantity as error:
        raise ValueError(
            "unknown type, expected memory or huge pages such as hugepages-1Gi"
        ) from error


def parse_cpu_count_or_percent(value: str | int) -> CPUAmount:
    """A number of CPUs, or a percentage of them."""
    text = str(value)
    match = _PERCENT_PATTERN.fullmatch(text)
    if match is not None and float(match[1]) <= 100:
        return CPUAmount(percent=float(match[1]))
    if text.isascii() and text.isdigit() and len(text) <= 4 and int(text) <= _MAX_CPUS:
        return CPUAmount(int(text))
    raise ValueError(f"{text[:40]!r}, expected a number of CPUs, or a part of them such as 25%")


def parse_pool_floor(value: str | int) -> CPUAmount | None:
    """The floor of the shared pool; None for ``auto``."""
    return None if value == AUTO else parse_cpu_count_or_percent(value)


def parse_duration(value: str | float) -> float:
    """Seconds of a number, or of a text such as ``1m30s`` or ``250ms``."""
    if isinstance(value, str):
        if value.isascii() and value.isdigit() and len(value) <= 10:
            return float(value)
        if len(value) > 40 or not _DURATION_PATTERN.fullmatch(value):
            raise ValueError(
                f"{value[:40]!r} is no duration, expected seconds or a text such as 30s"
            )
        total = Fraction(0)
        for number, unit in _DURATION_PART.findall(value):
            total += Fraction(number) * _SECONDS_BY_UNIT[unit]
        return float(total)
    if not 0 <= value < float("inf"):
        raise ValueError(f"{value} is no duration, expected 0 or more seconds")
    return float(value)


def build_duration_check(
    least: float, most: float = float("inf")
) -> Callable[[str | float], object]:
    """A check of durations by seconds."""

    def check_duration(value: str | float) -> None:
        if not least <= parse_duration(value) <= most:
            limit = f"to {most:g}s" if most < float("inf") else "or more"
            raise ValueError(f"{value}, expected {least:g}s {limit}")

    return check_duration


# --- Lists of ids -------------------------------------------------------------------------------


def parse_cpus(value: str | int) -> CPUSet:
    """The CPUs of a kernel list; a YAML reader makes a number of a list with one id."""
    return _parse_set(CPUSet.parse, value)


def parse_numa_nodes(value: str | int) -> NUMASet:
    """The NUMA nodes, or memory tiers, of a kernel list."""
    return _parse_set(NUMASet.parse, value)


def _parse_set(parse: Callable[[str], _CPUOrNUMASet], value: str | int) -> _CPUOrNUMASet:
    try:
        return parse(str(value))
    except ListFormatError as error:
        raise ValueError(f"{error}, expected a kernel list such as 0-3,8") from error


# --- Paths and addresses ------------------------------------------------------------------------


def build_absolute_path_check(most: int = 4095, *, empty: bool = False, why: str = "") -> Check:
    """A check of paths by their bytes; an ``empty`` one may say that there is none."""
    limit = f" of at most {most} bytes{why}" if most != 4095 else ""

    def check_absolute_path(path: str) -> None:
        if not (empty and not path) and not (
            path.startswith("/") and "\0" not in path and len(path.encode()) <= most
        ):
            raise ValueError(f"{path[:120]!r}, expected an absolute path{limit}")

    return check_absolute_path


def check_absolute_paths(paths: Sequence[str]) -> None:
    """A few of them."""
    if len(paths) > 8:
        raise ValueError(f"{len(paths)} directories, expected at most 8")
    for path in paths:
        build_absolute_path_check()(path)


def check_unix_socket_address(value: str) -> None:
    """The address of a unix socket as CRI's clients write it, with or without ``unix://``."""
    build_absolute_path_check(MAX_SOCKET_PATH_BYTES, why=", with or without unix:// in front")(
        value.removeprefix("unix://")
    )


def split_address(address: str) -> tuple[str, int] | None:
    """Host and port of ``host:port`` or ``[IPv6]:port``; None when the address is ``off``.

    An empty host means every interface.
    """
    if address == "off":
        return None
    host, colon, port_text = address.rpartition(":")
    wanted = f"{address!r} is no address, expected host:port, [IPv6]:port or off"
    if not colon or not (port_text.isascii() and port_text.isdigit()) or len(port_text) > 5:
        raise ValueError(wanted)
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ValueError(wanted)
    port = int(port_text)
    if port > 65535:
        raise ValueError(f"port {port} is above 65535")
    if any(c.isspace() or c in "[]/" for c in host):
        raise ValueError(wanted)
    return host, port


def is_loopback(host: str) -> bool:
    """Say whether only this machine can reach a listener on ``host``."""
    return host in ("localhost", "::1") or bool(re.fullmatch(r"127(\.[0-9]{1,3}){3}", host))


def check_prometheus_url(url: str) -> None:
    """The address of a Prometheus server, or none."""
    if url and not url.startswith(("http://", "https://")):
        raise ValueError(f"{url[:80]!r}, expected http:// or https://")


def check_node_page_url_template(url: str) -> None:
    """The address of a node's page, with the node in it, or none."""
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
    """The name of a Node, or none."""
    if name and (len(name) > 253 or not _DNS_NAME.fullmatch(name)):
        raise ValueError(
            f"{name[:80]!r}, expected a node's name as Kubernetes has it: a DNS name in lower case "
            "such as worker-7.example.org"
        )


def check_annotation_prefix(prefix: str) -> None:
    """The prefix of annotations."""
    if len(prefix) > 253 or not _DNS_NAME.fullmatch(prefix):
        raise ValueError(
            f"{prefix[:80]!r}, expected a DNS name such as numa.kubernetes.io (lower case, no "
            "slash)"
        )


def check_driver_name(driver: str) -> None:
    """The name of a DRA driver."""
    if len(driver) > _MAX_DRIVER_NAME_CHARS or not _DRIVER_NAME_PATTERN.fullmatch(driver):
        raise ValueError(
            f"{driver[:120]!r}, expected a DNS name in lower case with a dot, of at most "
            f"{_MAX_DRIVER_NAME_CHARS} characters, such as dra.example.com"
        )


def parse_plugin_index(index: str | int) -> str:
    """The plugin index as the protocol wants it."""
    found = f"{index:02d}" if isinstance(index, int) else index
    if not re.fullmatch(r"[0-9]{2}", found, re.ASCII):
        raise ValueError(f"{found[:20]!r}, expected two digits from 00 to 99")
    return found


_RESOURCE_NAME_PART_PATTERN = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?", re.ASCII)
_QUOTA_RESOURCE_PREFIX = "requests."
"""What a ResourceQuota puts before the name, which must be a good one with it as well."""
_MAX_RESOURCE_PREFIX_CHARS = 253 - len(_QUOTA_RESOURCE_PREFIX)


def check_extended_resource(name: str) -> None:
    """The name of an extended resource.

    Source: kubernetes ``pkg/apis/core/v1/helper/helpers.go`` (IsExtendedResourceName) and
    ``staging/src/k8s.io/apimachinery/pkg/util/validation``.
    """
    prefix, slash, rest = name.partition("/")
    shown, good = repr(name[:120]), "such as example.com/exclusive-cpu"
    if not slash:
        raise ValueError(f"{shown} has no prefix, expected a DNS name, a slash and a name, {good}")
    if "kubernetes.io/" in name:
        raise ValueError(
            f"{shown} is below kubernetes.io, which the API server keeps for Kubernetes; expected "
            f"a DNS name of yours as prefix, {good}"
        )
    if name.startswith(_QUOTA_RESOURCE_PREFIX):
        raise ValueError(
            f"{shown} begins with {_QUOTA_RESOURCE_PREFIX}, which is the language of quotas; "
            "expected another"
        )
    if len(prefix) > _MAX_RESOURCE_PREFIX_CHARS or not _DNS_NAME.fullmatch(prefix):
        raise ValueError(
            f"{shown}: the prefix is no DNS name (lower case, at most {_MAX_RESOURCE_PREFIX_CHARS} "
            f"characters), expected one {good}"
        )
    if len(rest) > 63 or not _RESOURCE_NAME_PART_PATTERN.fullmatch(rest):
        raise ValueError(
            f"{shown}: after the slash, expected up to 63 letters, digits, -, _ and ., a letter or "
            f"digit at both ends, {good}"
        )
