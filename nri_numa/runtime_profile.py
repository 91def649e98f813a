"""Differences between container runtimes, by name and version: one row for each.

A runtime reports its name, its version, and from NRI 0.12 on the NRI release inside. Its report
overrides its row. A name or version without a row is expected to support the minimum.
"""

from __future__ import annotations

import enum
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from nri_numa.runtime import RuntimeInfo
from nri_numa.text import Version, parse_version

_NRI_WITH_SAFE_REGISTRATION: Final = (0, 6, 1)
"""nri#79, containerd#10085: before, a registration and an event deadlock."""
_NRI_WITH_TIMEOUTS: Final = (0, 7, 0)
"""Reports its timeouts in Configure, and sends Synchronize to the plugins that it launched."""
_NRI_WITH_OWN_RELEASE: Final = (0, 12, 0)
"""Reports its own release in Configure, and has memory policies."""
_NRI_WITH_SAFE_UPDATES: Final = (0, 12, 1)
"""nri#301, containerd#13733: before, UpdateContainers and an event deadlock."""


CRI_O_SHARED_CPUS_ANNOTATION: Final = "cpu-shared.crio.io"
"""With ``/CONTAINER: enable`` CRI-O adds its ``shared_cpuset`` to the container's cpuset."""
CRI_O_SHARED_CPUS_VARIABLE: Final = "OPENSHIFT_SHARED_CPUS"
"""Variable with the CPUs that CRI-O has added; each later update adds them again."""


class PushPath(enum.StrEnum):
    """Way to send an update that answers no request."""

    UPDATE_CONTAINERS = "update-containers"
    """The plain call."""
    ONE_SHOT = "one-shot"
    """A second registration that answers Synchronize with the updates."""
    NONE = "none"
    """No way is known to be safe."""


class RuntimeFiles(Struct, frozen=True, kw_only=True):
    """Names by which a runtime is found on a node and set up.

    Attributes:
        title: the name as its project writes it.
        program: executable, process and systemd unit.
        config: its configuration file.
        cri_socket: the socket on which it serves CRI by default.
        nri_section: the settings that turn NRI on.
        min_version: first version with NRI.
    """

    title: str
    program: str
    config: str
    cri_socket: str
    nri_section: str
    min_version: str


CONTAINERD_FILES: Final = RuntimeFiles(
    title="containerd",
    program="containerd",
    config="/etc/containerd/config.toml",
    cri_socket="/run/containerd/containerd.sock",
    nri_section="[plugins.'io.containerd.nri.v1.nri']\n  disable = false\n",
    min_version="1.7",
)
CRI_O_FILES: Final = RuntimeFiles(
    title="CRI-O",
    program="crio",
    config="/etc/crio/crio.conf",
    cri_socket="/run/crio/crio.sock",
    nri_section="[crio.nri]\nenable_nri = true\n",
    min_version="1.26",
)


class RuntimeProfile(Struct, frozen=True, kw_only=True):
    """Behaviour of a runtime.

    Attributes:
        files: names by which it is found and set up.
        nri_release: the minimum NRI release inside; (0, 0, 0) if not known, None if it has no NRI.
        nri_by_default: True if NRI is on when the configuration does not mention it.
        merges_config_tables: True if a file adds keys to a table of the previous files; else the
            last file that has the table replaces it.
        tells_pod_resize: True if an event after the resize of a pod has its new sum of resources.
        reports_failed_creations: True if StopContainer or RemoveContainer follows a creation that
            fails after the plugin has answered; else the container's cgroup, which is made within
            the creation, shows that it succeeded.
    """

    files: RuntimeFiles = CONTAINERD_FILES
    nri_release: Version | None = (0, 0, 0)
    nri_by_default: bool = True
    merges_config_tables: bool = True
    tells_pod_resize: bool = False
    reports_failed_creations: bool = True

    @property
    def push(self) -> PushPath:
        """Way to push updates that cannot make the runtime hang."""
        release = self.nri_release or (0, 0, 0)
        if release >= _NRI_WITH_SAFE_UPDATES:
            return PushPath.UPDATE_CONTAINERS
        return PushPath.ONE_SHOT if release >= _NRI_WITH_SAFE_REGISTRATION else PushPath.NONE

    @property
    def synchronizes_launched(self) -> bool:
        """True if a plugin that the runtime launched gets Synchronize, too."""
        return (self.nri_release or (0, 0, 0)) >= _NRI_WITH_TIMEOUTS

    @property
    def has_pod_update_event(self) -> bool:
        """True if it knows UpdatePodSandbox; else it disconnects on its bit in the event mask."""
        return (self.nri_release or (0, 0, 0)) >= _NRI_WITH_OWN_RELEASE

    @property
    def has_memory_policies(self) -> bool:
        """True if memory policies are passed to the OCI runtime."""
        return (self.nri_release or (0, 0, 0)) >= _NRI_WITH_OWN_RELEASE


_CONTAINERD_1_7: Final = RuntimeProfile(
    nri_release=(0, 3, 0), nri_by_default=False, merges_config_tables=False
)
_CRI_O: Final = RuntimeProfile(
    files=CRI_O_FILES, nri_release=(0, 6, 1), reports_failed_creations=False
)
_UNKNOWN: Final = RuntimeProfile()

PROFILES: Final[tuple[tuple[str, Version, RuntimeProfile], ...]] = (
    ("containerd", (2, 3, 0), RuntimeProfile(nri_release=(0, 12, 0), tells_pod_resize=True)),
    ("containerd", (2, 0, 0), RuntimeProfile(nri_release=(0, 8, 0))),
    ("containerd", (1, 7, 26), replace(_CONTAINERD_1_7, nri_release=(0, 8, 0))),
    ("containerd", (1, 7, 16), replace(_CONTAINERD_1_7, nri_release=(0, 6, 1))),
    ("containerd", (1, 7, 0), _CONTAINERD_1_7),
    ("containerd", (0, 0, 0), replace(_CONTAINERD_1_7, nri_release=None)),
    ("cri-o", (1, 37, 0), replace(_CRI_O, nri_release=(0, 12, 0))),
    ("cri-o", (1, 34, 0), replace(_CRI_O, nri_release=(0, 10, 0))),
    ("cri-o", (1, 31, 0), _CRI_O),
    ("cri-o", (1, 30, 0), replace(_CRI_O, nri_release=(0, 6, 0))),
    ("cri-o", (1, 26, 0), replace(_CRI_O, nri_release=(0, 0, 0), nri_by_default=False)),
    ("cri-o", (0, 0, 0), replace(_CRI_O, nri_release=None, nri_by_default=False)),
)
"""Rows by name and first version, the latest first."""


def profile_of_version(name: str, version: str) -> RuntimeProfile:
    """Return the row of a runtime that has sent no Configure."""
    release = parse_version(version)
    if release is not None:
        for row_name, first_version, profile in PROFILES:
            if name.lower() == row_name and release >= first_version:
                return profile
    return _UNKNOWN


def profile_of(info: RuntimeInfo) -> RuntimeProfile:
    """Return the row of a runtime, with the NRI release that follows from its Configure."""
    row = profile_of_version(info.name, info.version)
    release = row.nri_release or (0, 0, 0)
    if info.nri_version:
        # Builds outside a release report ``0.0.0-unknown`` or ``(devel)``.
        nri_release = parse_version(info.nri_version) or _NRI_WITH_OWN_RELEASE
        if nri_release == _NRI_WITH_SAFE_UPDATES and "-" in info.nri_version:
            nri_release = _NRI_WITH_OWN_RELEASE  # v0.12.1-0.20260101… is a build *before* v0.12.1
        release = max(nri_release, _NRI_WITH_OWN_RELEASE)
    elif info.registration_timeout:
        release = min(max(release, _NRI_WITH_TIMEOUTS), (0, 11, 0))
    else:
        release = min(release, _NRI_WITH_SAFE_REGISTRATION)
    return replace(row, nri_release=release)
