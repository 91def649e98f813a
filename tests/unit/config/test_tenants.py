"""Permissions, quotas and the floor of the shared pool, as they stand in the configuration."""

from pathlib import Path

import pytest

from nri_numa.config import changed_paths, derive_settings, load_config, validate_config
from nri_numa.errors import ConfigError
from tests.machines import named as machines

TENANTS = """
permissions:
  - match: {namespaces: [db-*], labels: {tier: gold}, qos: [Guaranteed]}
    allowUnrequestedCPUs: true
    allowReservedCPUs: true
  - allowedKeys: [policy, numacpu]
    allowedValues: {policy: [best-effort], numacpu: [0-3, 8]}
    onDenied: ignore
quotas:
  exclusiveCPUs: 75%
  idleSiblings: 4
  listedCPUs: 12.5%
  namespaces:
    - namespaces: [team-*]
      exclusiveCPUs: 16
sharedPool: {minCPUs: 10%, minCPUsPerNUMANode: 1}
"""


def test_permissions_and_quotas_reach_the_engine(tmp_path: Path) -> None:
    path = tmp_path / "agent.yaml"
    path.write_text(TENANTS)
    found = derive_settings(load_config(str(path)))
    trusted, rest = found.permissions
    assert (trusted.name, trusted.namespaces, trusted.labels) == (
        "permissions[0]",
        ("db-*",),
        {"tier": "gold"},
    )
    assert trusted.allow_unrequested_cpus
    assert trusted.allow_reserved_cpus
    assert trusted.allowed_keys == ("*",)
    assert rest.allowed_values == {"policy": ("best-effort",), "numacpu": ("0-3", "8")}
    assert rest.on_denied == "ignore"
    limits = found.limits
    assert [
        str(a) for a in (limits.quota.exclusive, limits.idle_siblings, limits.quota.listed)
    ] == ["75%", "4", "12.5%"]
    assert limits.namespaces[0].quota.exclusive.cpus_of_total(64) == 16
    assert limits.pool is not None
    assert (limits.pool.cpus_of_total(64), limits.numa_pool.cpus_of_total(8)) == (6, 1)


def test_every_mistake_about_tenants_is_told_at_once() -> None:
    text = """
permissions:
  - allowedKeys: [polcy]
  - allowedKeys: [policy]
    allowedValues: {cpus: [shared], smt: [], numa: [x], policy: [best]}
quotas:
  exclusiveCPUs: 101%
  idleSiblings: many
  listedCPUs: -1
  namespaces:
    - exclusiveCPUs: 9000
sharedPool: {minCPUs: "", minCPUsPerNUMANode: auto}
"""
    with pytest.raises(ConfigError) as caught:
        load_config(text=text)
    told = "\n".join(caught.value.problems)
    for words in (
        "permissions[0].allowedKeys: 'polcy' is not a known key",
        "permissions[0].match: matches every pod, so that the entries after it never count",
        "permissions[1].allowedValues.cpus: has values, but permissions[1].allowedKeys does not",
        "permissions[1].allowedValues.smt: is empty",
        "permissions[1].allowedValues: 'numa' is not a known key",
        "permissions[1].allowedValues.policy: 'best' is not valid, expected one of none",
        "quotas.exclusiveCPUs: '101%', expected a number of CPUs, or a part of them such as 25%",
        "quotas.idleSiblings: 'many'",
        "quotas.listedCPUs: '-1'",
        "quotas.namespaces[0].namespaces: is empty",
        "quotas.namespaces[0].exclusiveCPUs: '9000'",
        "sharedPool.minCPUs: ''",
        "sharedPool.minCPUsPerNUMANode: 'auto'",
    ):
        assert words in told


def test_a_floor_of_the_whole_machine_is_a_mistake() -> None:
    machine = machines.single_smt()
    told = validate_config(load_config(text="sharedPool: {minCPUs: 8}"), machine)
    assert told == [
        "sharedPool.minCPUs: 8 is the whole machine, which has 8 CPUs; no CPU could be exclusive"
    ]
    assert validate_config(load_config(text="sharedPool: {minCPUs: 7}"), machine) == []


def test_tenants_are_reloaded_live() -> None:
    live, restart = changed_paths(load_config(), load_config(text=TENANTS))
    assert {"permissions", "quotas.exclusiveCPUs", "quotas.namespaces", "sharedPool.minCPUs"} <= {
        *live
    }
    assert restart == ()
