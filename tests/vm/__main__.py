"""``python -m tests.vm``: boot the project's virtual machines and run cases in them.

Exit codes: 0 all cases passed, 1 a case failed, 2 wrong usage, 3 the bed cannot be had here (the
message says what to do about it), 130 interrupted.
"""

from __future__ import annotations

import argparse
import signal
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec

from tests.beds.testbed import TestbedUnavailable
from tests.beds.vm_bed import ARTIFACTS, BOOT_LIMIT_S, CASE_LIMIT_S, Run, prepare
from tests.beds.vm_records import Outcome, Result
from tests.machines.vm_machine import Machine, MachineError, load_machines
from tests.vm.churn_report import OPTIONS as CHURN_OPTIONS
from tests.vm.churn_report import Options
from tests.vm.pod_cards import moves_cards
from tests.vm.registry import all_cases, cases_for

MACHINES = Path(__file__).parent / "machines"
FAILED = 1
USAGE = 2
UNAVAILABLE = 3


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.vm", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="boot machines and run cases")
    run.add_argument("machine", help="name of a machine, 'core' or 'all'")
    run.add_argument("case", nargs="*", help="default: every case that the machine allows")
    run.add_argument("--boot-limit", type=float, default=BOOT_LIMIT_S, metavar="SECONDS")
    run.add_argument("--case-limit", type=float, default=CASE_LIMIT_S, metavar="SECONDS")
    run.add_argument("-v", "--verbose", action="store_true", help="print what was measured")
    churn = commands.add_parser(
        "churn", help="create and remove pods while plugin and runtime are killed"
    )
    usual = Options()
    churn.add_argument("--machine", default="two-sockets-smt", help="default: %(default)s")
    for name in Options.__struct_fields__:  # what they mean is said there
        value = getattr(usual, name)
        churn.add_argument(f"--{name}", type=type(value), default=value, help="%(default)s")
    churn.add_argument(
        "--into", type=Path, help="keep the artifacts of this run in a new directory there"
    )
    commands.add_parser("list", help="print machines and cases")
    commands.add_parser("prepare", help="install and download what is missing")
    return parser


def _list(machines: dict[str, Machine]) -> int:
    print("machines (* is in the core set)")
    for name, machine in machines.items():
        mark = "*" if machine.core else " "
        print(f"  {mark} {name:18} {machine.description} [containerd {machine.containerd}]")
    print("cases")
    for case in all_cases().values():
        count = sum(1 for machine in machines.values() if case.applies(machine))
        print(f"    {case.name:38} {case.proves} [{count} machines]")
    return 0


def _chosen(machines: dict[str, Machine], name: str) -> list[Machine]:
    if name == "all":
        return list(machines.values())
    if name == "core":
        return [machine for machine in machines.values() if machine.core]
    return [machines[name]]


def _report(result: Result, verbose: bool) -> None:
    print(f"  {result.outcome.value:8}{result.seconds:7.1f} s  {result.case}", flush=True)
    if result.detail:
        print(textwrap.indent(result.detail.rstrip(), " " * 8), flush=True)
    if verbose or result.outcome is Outcome.FAILED:
        for note in result.notes:
            print(f"        {note}", flush=True)


def _run(machines: dict[str, Machine], options: argparse.Namespace) -> int:
    if options.machine not in {*machines, "all", "core"}:
        names = ", ".join([*machines, "core", "all"])
        print(f"error: no machine {options.machine!r}, expected one of {names}", file=sys.stderr)
        return USAGE
    if unknown := sorted(set(options.case) - set(all_cases())):
        print(f"error: no case {', '.join(unknown)}; see python -m tests.vm list", file=sys.stderr)
        return USAGE
    chosen = _chosen(machines, options.machine)
    parts = prepare(
        containerd=sorted({machine.containerd for machine in chosen}),
        cni=any(moves_cards(machine) for machine in chosen),
        systems={machine.system for machine in chosen},
    )
    count: Counter[Outcome] = Counter()
    for machine in chosen:
        cases = [
            case.name
            for case in cases_for(machine)
            if not options.case or case.name in options.case
        ]
        if not cases:
            print(f"{machine.name}: none of the cases makes sense on it")
            continue
        print(
            f"{machine.name}: {machine.description}, kernel {parts.kernel_of(machine).version}",
            flush=True,
        )
        start = time.monotonic()
        run = Run(
            parts,
            machine,
            cases,
            boot_limit_s=options.boot_limit,
            case_limit_s=options.case_limit,
        )
        for result in run:
            count[result.outcome] += 1
            _report(result, options.verbose)
        print(f"  {time.monotonic() - start:.0f} s, logs in {run.directory}", flush=True)
    print(
        f"{count[Outcome.PASSED]} passed, {count[Outcome.FAILED]} failed, "
        f"{count[Outcome.SKIPPED]} skipped"
    )
    return FAILED if count[Outcome.FAILED] else 0


def _churn(machines: dict[str, Machine], options: argparse.Namespace) -> int:
    names = [name for name, machine in machines.items() if all_cases()["churn"].applies(machine)]
    if options.machine not in names:
        print(f"error: machine {options.machine!r}, expected {', '.join(names)}", file=sys.stderr)
        return USAGE
    wanted = Options(**{name: getattr(options, name) for name in Options.__struct_fields__})
    machine = machines[options.machine]
    directory = ARTIFACTS / "churn"
    if options.into is not None:
        began = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        directory = options.into.resolve() / f"{machine.name}-{options.seed}-{began}"
    run = Run(
        prepare(containerd=[machine.containerd]),
        machine,
        ["churn"],
        directory=directory,
        # The guest's minutes are long ones.
        case_limit_s=24 * 3600,
        environment={CHURN_OPTIONS: msgspec.json.encode(wanted).decode()},
        counted=True,
    )
    print(f"{machine.name}: progress in {run.directory}/guest.log", flush=True)
    (result,) = run
    _report(result, verbose=True)
    print(f"figures in {run.directory}/churn.json")
    return FAILED if result.outcome is Outcome.FAILED else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    options = _parser().parse_args(arguments)
    # Whoever stops us wants the machine to end, too.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        machines = load_machines(MACHINES)
        if options.command == "list":
            return _list(machines)
        if options.command == "prepare":
            parts = prepare()
            print(f"kernel {parts.kernel.version}: {parts.kernel.image}")
            print(f"virtme-ng: {parts.virtme}\nQEMU: {parts.qemu}")
            return 0
        if options.command == "churn":
            return _churn(machines, options)
        return _run(machines, options)
    except MachineError as error:
        print(f"error: {error}", file=sys.stderr)
        return USAGE
    except TestbedUnavailable as error:
        print(f"bed unavailable: {error.what}\nremedy: {error.remedy}", file=sys.stderr)
        return UNAVAILABLE
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
