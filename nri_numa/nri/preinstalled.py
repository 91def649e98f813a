"""Being launched by the runtime: a connected socket and three environment variables."""

from __future__ import annotations

import os
from collections.abc import MutableMapping

import msgspec

from nri_numa.errors import ConfigError
from nri_numa.nri.wire.versions import identity_problem


class Preinstalled(msgspec.Struct, frozen=True, kw_only=True):
    """What a runtime tells a plugin it launched."""

    descriptor: int
    name: str
    index: str


def preinstalled_from_environment(environ: MutableMapping[str, str]) -> Preinstalled | None:
    """Take over the descriptor of a plugin that the runtime launched.

    The three variables are removed and the descriptor is made close-on-exec, so that no child
    process inherits either.

    Args:
        environ: usually ``os.environ``; changed.

    Returns:
        None when this process was not launched by a runtime.

    Raises:
        ConfigError: NRI_PLUGIN_SOCKET is set and is not an open descriptor, or name or index is
            missing or malformed.
    """
    text = environ.get("NRI_PLUGIN_SOCKET")
    if text is None:
        return None
    del environ["NRI_PLUGIN_SOCKET"]
    name = environ.pop("NRI_PLUGIN_NAME", "")
    index = environ.pop("NRI_PLUGIN_IDX", "")
    problems = []
    if (problem := identity_problem(name, index)) is not None:
        problems.append(f"NRI_PLUGIN_NAME, NRI_PLUGIN_IDX: {problem}")
    descriptor = -1
    try:
        if not (text.isascii() and text.isdigit()):
            raise ValueError("not a decimal number")
        descriptor = int(text)
        os.set_inheritable(descriptor, False)
    except (ValueError, OverflowError, OSError) as error:
        problems.append(
            f"NRI_PLUGIN_SOCKET: {text!r} is no open file descriptor ({error}); expected what the"
            " runtime sets when it launches a plugin"
        )
    if problems:
        raise ConfigError("environment", problems)
    return Preinstalled(descriptor=descriptor, name=name, index=index)
