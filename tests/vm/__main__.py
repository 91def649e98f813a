"""``python -m tests.vm``: the project's virtual machines beside pytest, which runs their cases.

Exit codes: 0 it passed, 1 it failed, 2 wrong usage, 3 the bed cannot be had here (the
message says what to do about it), 130 interrupted.
"""

import argparse
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from tests.beds.testbed import TestbedUnavailable
from tests.beds.vm_bed import ARTIFACTS, Run, prepare
from tests.beds.vm_records import Outcome
from tests.machines.vm_machine import Machine, MachineError, load_machines
from tests.vm.churn_report import OPTIONS as CHURN_OPTIONS
from tests.vm.churn_report import Options
from tests.vm.registry import all_cases

MACHINES = Path(__file__).parent / "machines"
FAILED = 1
USAGE = 2
UNAVAILABLE = 3


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.vm", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
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
    print(f"{result.outcome.value} after {result.seconds:.0f} s\n{result.detail}")
    print(*result.notes, sep="\n")
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
        return _churn(machines, options)
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
