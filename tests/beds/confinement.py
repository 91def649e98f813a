"""What the runtime does to a container, done to this process: a seccomp profile, no capabilities.

The profile is in the form of the OCI runtime specification. libseccomp makes a filter of it, as it
does for runc; every Debian has it, for apt and systemd are linked with it. Free of pytest.
"""

import ctypes
import errno
import json
from pathlib import Path
from typing import Any, Final

_LIBRARY: Final = "libseccomp.so.2"
_ALLOW: Final = 0x7FFF0000
_ERRNO: Final = 0x00050000
_COMPARE: Final = {"SCMP_CMP_EQ": 4, "SCMP_CMP_MASKED_EQ": 7}
_LAST_CAPABILITY: Final = 63
_PR_CAPBSET_DROP: Final = 24
_PR_SET_NO_NEW_PRIVS: Final = 38
_VERSION_3: Final = 0x20080522
"""Of capset(2)."""


class _Comparison(ctypes.Structure):
    _fields_ = (
        ("arg", ctypes.c_uint),
        ("op", ctypes.c_int),
        ("datum_a", ctypes.c_uint64),
        ("datum_b", ctypes.c_uint64),
    )


def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(_LIBRARY)
    library.seccomp_init.restype = ctypes.c_void_p
    library.seccomp_init.argtypes = (ctypes.c_uint32,)
    for name in ("seccomp_load", "seccomp_release"):
        getattr(library, name).argtypes = (ctypes.c_void_p,)
    library.seccomp_arch_resolve_name.restype = ctypes.c_uint32
    library.seccomp_rule_add_array.argtypes = (
        *(ctypes.c_void_p, ctypes.c_uint32, ctypes.c_int, ctypes.c_uint),
        ctypes.POINTER(_Comparison),
    )
    return library


def number(name: str, architecture: str) -> int | None:
    """The number of a system call; None where the architecture has none of this name.

    `architecture`: as libseccomp calls it: ``x86_64``, ``aarch64``.
    """
    library = _library()
    token = library.seccomp_arch_resolve_name(architecture.encode())
    found = int(library.seccomp_syscall_resolve_name_arch(token, name.encode()))
    if not token or found == -1:
        raise ValueError(f"no system call {name} on {architecture}")
    return found if found >= 0 else None


def _action(name: str, number: int) -> int:
    return _ALLOW if name == "SCMP_ACT_ALLOW" else {"SCMP_ACT_ERRNO": _ERRNO | number}[name]


def load(profile: Path) -> None:
    """Put this process, for good, under a profile.

    Raises:
        OSError: libseccomp or the kernel refuses.
        KeyError: the profile has something that is not done here.
    """
    document: dict[str, Any] = json.loads(profile.read_text(encoding="utf-8"))
    library = _library()
    otherwise = _action(document["defaultAction"], document["defaultErrnoRet"])
    context = library.seccomp_init(otherwise)
    for rule in document["syscalls"]:
        action = _action(rule["action"], rule.get("errnoRet", 0))
        comparisons = [
            _Comparison(arg["index"], _COMPARE[arg["op"]], arg["value"], arg.get("valueTwo", 0))
            for arg in rule.get("args", ())
        ]
        array = (_Comparison * len(comparisons))(*comparisons)
        for name in rule["names"]:
            call = library.seccomp_syscall_resolve_name(name.encode())
            if call == -1:  # newer than this libseccomp
                continue
            _done(library.seccomp_rule_add_array(context, action, call, len(array), array), name)
    _done(library.seccomp_load(context), str(profile))
    library.seccomp_release(context)


def drop_capabilities() -> None:
    """Take every capability from this process, for good, and new privileges with them.

    Raises:
        OSError: the kernel refuses.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    for capability in range(_LAST_CAPABILITY + 1):
        if libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0) != 0:
            if ctypes.get_errno() == errno.EINVAL:  # the kernel has no more of them
                break
            raise OSError(ctypes.get_errno(), f"dropping capability {capability}")
    header, nothing = (ctypes.c_uint32 * 2)(_VERSION_3, 0), (ctypes.c_uint32 * 6)()
    if libc.capset(header, nothing) != 0:
        raise OSError(ctypes.get_errno(), "capset")
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "no new privileges")


def _done(status: int, what: str) -> None:
    if status != 0:
        raise OSError(-status, f"seccomp: {what}")
