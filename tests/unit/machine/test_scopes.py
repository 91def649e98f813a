"""systemd has for a container's scope what its cgroup has."""

from pathlib import Path

import pytest

from nri_numa.machine.cgroups import CgroupPlace, SystemdScopes
from nri_numa.model.cpuset import CPUSet, NUMASet
from tests.beds.systemd_bus import SystemdBus

PLACE = CgroupPlace("kubepods.slice:cri-containerd:abc")
UNIT = "cri-containerd-abc.scope"
CPUS, MEMS = CPUSet.parse("0-2,9"), NUMASet.parse("1")


def test_what_differs_is_set_once(systemd: SystemdBus) -> None:
    systemd.make(UNIT, AllowedCPUs="0-15")
    assert systemd.scopes.sync_scope(PLACE, CPUS, MEMS) == ""
    assert systemd.scopes.sync_scope(PLACE, CPUS, MEMS) == ""
    assert systemd.calls == [(UNIT, {"AllowedCPUs": "0-2,9", "AllowedMemoryNodes": "1"})]
    assert systemd.has(UNIT) == "0-2 9"


def test_memory_nodes_that_are_left_alone_are_left_alone_here_too(systemd: SystemdBus) -> None:
    systemd.make(UNIT, AllowedMemoryNodes="0")
    assert systemd.scopes.sync_scope(PLACE, CPUS, NUMASet()) == ""
    assert systemd.has(UNIT, "AllowedMemoryNodes") == "0"


def test_what_the_scope_was_made_with_counts_until_it_is_set(systemd: SystemdBus) -> None:
    (systemd.transient / UNIT).write_text("[Scope]\nAllowedCPUs=0-2 9\nAllowedMemoryNodes=1\n")
    assert systemd.scopes.sync_scope(PLACE, CPUS, MEMS) == ""
    assert systemd.calls == []
    (systemd.transient / UNIT).write_text("[Scope]\nAllowedCPUs=?\n")
    assert systemd.scopes.sync_scope(PLACE, CPUS, MEMS) == ""
    assert len(systemd.calls) == 1


def test_a_cpu_limit_is_lifted_only_where_that_is_meant(systemd: SystemdBus) -> None:
    systemd.make(UNIT, AllowedCPUs="0-2 9", AllowedMemoryNodes="1", CPUQuota="150%")
    assert systemd.scopes.sync_scope(PLACE, CPUS, MEMS) == ""
    assert (systemd.calls, systemd.has(UNIT, "CPUQuota")) == ([], "150%")
    for _ in range(2):
        assert systemd.scopes.sync_scope(PLACE, CPUS, MEMS, lift_quota=True) == ""
    ((_, values),) = systemd.calls
    assert values == {"AllowedCPUs": "0-2,9", "AllowedMemoryNodes": "1", "CPUQuotaPerSecUSec": ""}
    assert systemd.has(UNIT, "CPUQuota") == ""


def test_a_scope_made_with_a_cpu_limit_is_known_to_have_it(systemd: SystemdBus) -> None:
    (systemd.transient / UNIT).write_text("[Scope]\nCPUQuota=100%\nAllowedCPUs=0-2 9\n")
    systemd.deaf = True
    problem = systemd.scopes.sync_scope(PLACE, CPUS, NUMASet(), lift_quota=True)
    assert problem == f"{UNIT}: systemd took CPUQuotaPerSecUSec and has another one"


def test_what_is_not_meant_any_more_is_not_set(systemd: SystemdBus) -> None:
    systemd.make(UNIT)
    assert systemd.scopes.sync_scope(PLACE, CPUS, MEMS, lambda: False)
    assert systemd.calls == []


def test_without_systemd_or_scope_nothing_is_done(systemd: SystemdBus, tmp_path: Path) -> None:
    assert systemd.scopes.sync_scope(PLACE, CPUS, MEMS) == ""
    assert (
        SystemdScopes(str(tmp_path / "none"), str(tmp_path / "no-bus")).sync_scope(
            PLACE, CPUS, MEMS
        )
        == ""
    )


def test_why_it_has_something_else_is_said(systemd: SystemdBus) -> None:
    systemd.make(UNIT)
    systemd.refusing = "Unit is frozen"
    assert "Unit is frozen" in systemd.scopes.sync_scope(PLACE, CPUS, MEMS)
    systemd.refusing, systemd.deaf = "", True
    assert "AllowedCPUs" in systemd.scopes.sync_scope(PLACE, CPUS, MEMS)
    systemd.deaf = False
    assert systemd.scopes.sync_scope(PLACE, CPUS, MEMS) == ""


def test_a_bus_that_is_away_is_called_again(systemd: SystemdBus, tmp_path: Path) -> None:
    systemd.make(UNIT)
    scopes = SystemdScopes(str(systemd.transient), str(tmp_path / "later"))
    with pytest.raises(OSError, match="No such file"):
        scopes.sync_scope(PLACE, CPUS, MEMS)
    (tmp_path / "later").symlink_to(tmp_path / "systemd/bus")
    assert scopes.sync_scope(PLACE, CPUS, MEMS) == ""
