"""The list of cases: what each proves, and the machines it makes sense on.

A case is a function of one `tests.vm.guest.Guest`. It passes by returning, fails by raising, and
says with `skip` that the machine turned out not to allow it. Cases are imported on the host, too,
where they are only listed.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tests.machines.vm_machine import Machine

if TYPE_CHECKING:
    from tests.vm.guest import Guest

# Order of running: first what needs no plugin, last what changes the machine.
MODULES = (
    "machine",
    "listed_cpus",
    "policies",
    "memory",
    "lifecycle",
    "devices",
    "hotplug",
    "everyday",
    "churn",
    "neighbours",
)


CASE_LIMIT_S = 400


class SkipCase(Exception):
    """The machine does not allow this case; the text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One case."""

    name: str
    proves: str
    run: Callable[[Guest], None]
    applies: Callable[[Machine], bool]
    plugin: bool
    runtime: bool = True
    limit_s: int = CASE_LIMIT_S
    system: bool = False
    turn: int | None = None


_CASES: dict[str, Case] = {}


def case(
    *,
    applies: Callable[[Machine], bool] = lambda machine: True,
    plugin: bool = True,
    runtime: bool = True,
    limit_s: int = CASE_LIMIT_S,
    system: bool = False,
    turn: int | None = None,
) -> Callable[[Callable[[Guest], None]], Callable[[Guest], None]]:
    """Register a function as a case under its own name; its docstring says what it proves.

    `turn`: CI runs it on even days (0) or on odd ones (1) only.
    """

    def register(function: Callable[[Guest], None]) -> Callable[[Guest], None]:
        name = function.__name__
        assert name not in _CASES, f"case {name} is registered twice"
        assert function.__doc__, f"case {name} does not say what it proves"
        _CASES[name] = Case(
            name=name,
            proves=function.__doc__.strip().splitlines()[0],
            run=function,
            applies=applies,
            plugin=plugin,
            runtime=runtime,
            limit_s=limit_s,
            system=system,
            turn=turn,
        )
        return function

    return register


def all_cases() -> Mapping[str, Case]:
    """Every case by name, in the order of running."""
    for module in MODULES:
        importlib.import_module(f"tests.vm.cases.{module}")
    return dict(_CASES)


def cases_for(machine: Machine) -> list[Case]:
    """The cases that make sense on a machine, in the order of running."""
    if machine.kubernetes:
        return []  # tests/kube boots it, with a kubelet in it
    if machine.cases:
        return [all_cases()[name] for name in machine.cases]
    return [
        each
        for each in all_cases().values()
        if each.applies(machine) and (each.system or not machine.system)
    ]


def skip(reason: str) -> None:
    raise SkipCase(reason)
