"""``python -m bench.cluster``: pods behind a real kube-scheduler; needs root and Kubernetes."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from bench import extender, machine
from bench.cluster import brim, chaos, looking, real, stream, throughput
from bench.stats import table

VARIANTS: dict[str, Callable[[stream.Stream], stream.Found]] = {
    "stock kube-scheduler": stream.stock,
    "rules of the stock NRT plugin, published every 60 s": stream.stock_plugin,
    "nri-numa scheduler": stream.ours,
}


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(int(one) for one in text.split(","))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.cluster", description=__doc__)
    parser.add_argument("--nodes", type=int, default=50)
    parser.add_argument("--pods", type=int, default=600)
    parser.add_argument("--per-second", type=float, default=3.0)
    parser.add_argument(
        "--cpus", type=_sizes, default=stream.CPUS, help="sizes of pods (default: 4,6,8,10,12)"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--chaos", action="append", choices=[*chaos.KINDS, "all"],
        help="what goes wrong while pods flow behind our scheduler; only that is run",
    )  # fmt: skip
    parser.add_argument(
        "--throughput", action="store_true",
        help="pods in a second with the extender and without it; only what is named is run",
    )  # fmt: skip
    parser.add_argument(
        "--stock-plugin", default="", metavar="PROGRAM",
        help="with --throughput: a kube-scheduler with NodeResourceTopologyMatch, too",
    )  # fmt: skip
    parser.add_argument(
        "--looking", action="store_true",
        help="what kubectl numa cluster and the controller's page cost; only what is named is run",
    )  # fmt: skip
    parser.add_argument(
        "--filter", action="store_true",
        help="what one question about all nodes costs the extender; only what is named is run",
    )  # fmt: skip
    parser.add_argument(
        "--real", action="store_true",
        help=f"this machine is one more node, with a kubelet; each {real.EVERY}th pod is for it",
    )  # fmt: skip
    parser.add_argument(
        "--brim", action="append", choices=[*brim.KINDS, "all"],
        help="three bursts of more pods than fit, and what goes wrong meanwhile; only that is run",
    )  # fmt: skip
    parser.add_argument("--only", action="append", choices=list(VARIANTS))
    options = parser.parse_args(arguments)
    asked = stream.Stream(
        nodes=options.nodes,
        pods=options.pods,
        cpus=options.cpus,
        per_second=options.per_second,
        seed=options.seed,
        real=real.EVERY if options.real else 0,
    )
    print(machine.describe(), flush=True)
    if options.filter:
        head = ("what (p50 / p99, ms)", "wall", "CPU", "goal")
        print(table(head, extender.of_all(options.nodes, 60)), flush=True)
    if options.looking:
        print(looking.report(options.nodes, looking.measure(options.nodes)), flush=True)
    if options.throughput:
        measured = throughput.measure(options.nodes, options.pods, plugin=options.stock_plugin)
        print(throughput.report(measured), flush=True)
    if options.throughput or options.looking or options.filter:
        print(f"load average {machine.load()}")
        return 0
    if options.brim:
        kinds = brim.KINDS if "all" in options.brim else tuple(options.brim)
        rows = [brim.measure(kind, brim.Bursts()) for kind in kinds]
        print(f"{brim.report(rows)}\nload average {machine.load()}")
        return 1 if any(row[3] for row in rows) else 0
    if options.chaos:
        kinds = chaos.KINDS if "all" in options.chaos else tuple(options.chaos)
        run = stream.ours(asked, kinds)
        print(stream.report([(f"nri-numa scheduler, {', '.join(kinds)}", run)]))
        print(f"load average {machine.load()}")
        return 0 if run.good else 1
    found = []
    for name, run in VARIANTS.items():
        if options.only and name not in options.only:
            continue
        found.append((name, run(asked)))
        print(f"{name}: {found[-1][1].seconds:.0f} s, load average {machine.load()}", flush=True)
    print(stream.report(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
