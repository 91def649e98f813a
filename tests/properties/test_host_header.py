"""Host headers of any form: what is taken names this machine by an address or as localhost."""

import ipaddress

from hypothesis import example, given
from hypothesis import strategies as st

from nri_numa.web.security import is_expected_host

PIECES = (
    *("[", "]", ":", "%", "@", "/", ".", " ", "\t", "0", "9891", "\xff", "\xb2"),
    *("::1", "127.0.0.1", "localhost", "LOCALHOST", "evil", "evil.example", "fe80::1"),
)
HEADERS = st.lists(st.sampled_from(PIECES), max_size=6).map("".join)
HOSTS = st.sampled_from(("", "localhost", "127.0.0.1", "[::1]", "[FE80::1]", "10.0.0.1"))
PORTS = st.sampled_from(("", ":", ":80", ":9891"))


def host_of(header: str) -> str:
    """The header without its port."""
    host, colon, port = header.rpartition(":")
    return host if colon and all(c in "0123456789" for c in port) else header


def is_here(host: str) -> bool:
    """Whether DNS has no say in it: RFC 3986 has IPv6 in brackets, and nothing beside them."""
    try:
        if host.startswith("[") and host.endswith("]") and "%" not in host:
            return bool(ipaddress.IPv6Address(host[1:-1]))
        return host.lower() in ("", "localhost") or bool(ipaddress.IPv4Address(host))
    except ValueError:
        return False


@given(HEADERS)
@example("[::1]evil")
@example("[::1]evil:9891")
@example("evil[::1]")
@example("[::1%evil.example]")
@example("[[::1]]")
@example("[127.0.0.1]")
@example("127.0.0.1:evil")
@example("localhost:80:80")
@example("localhost:\xb2")
def test_what_is_taken_is_an_address_or_localhost_and_nothing_else(header: str) -> None:
    taken = is_expected_host(header.encode("latin-1"), "127.0.0.1")
    assert not taken or is_here(host_of(header))


@given(HOSTS, PORTS)
def test_every_form_of_an_address_is_taken(host: str, port: str) -> None:
    assert is_expected_host((host + port).encode(), "::1")
