"""The neutral judge: CRI create, start and stop through a real containerd, with and without us.

Plugin on and off take turns, batch by batch on one daemon, so that both see the same machine.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from bench.beds import PREFIX
from bench.stats import ms, summary, table
from tests.beds.containerd import MAIN_SERIES, Containerd, find_binaries
from tests.beds.cri import CRI, guaranteed
from tests.beds.plugin_process import PluginProcess
from tests.beds.testbed import TestbedUnavailable


def _cycle(cri: CRI, name: str) -> tuple[float, float]:
    pod = cri.run_pod(name, annotations={f"{PREFIX}policy": "best-effort"})
    begun = time.perf_counter()
    container = cri.create(pod, resources=guaranteed(0.1))
    created = time.perf_counter() - begun
    cri.start(container)
    begun = time.perf_counter()
    cri.stop(container)
    stopped = time.perf_counter() - begun
    cri.remove_pod(pod)
    return created, stopped


def measure(*, batches: int = 4, cycles: int = 8, series: str = MAIN_SERIES) -> str:
    """The table, or a sentence that says why there is none."""
    samples: dict[tuple[bool, str], list[float]] = {}
    try:
        with tempfile.TemporaryDirectory(prefix="nnb-") as scratch:
            directory = Path(scratch)
            with Containerd(find_binaries(series), directory / "c") as bed:
                for _ in range(2):
                    _cycle(bed.cri, "warm")
                plugin = PluginProcess(
                    directory / "p",
                    bed.nri_socket,
                    config={"log": {"level": "info", "format": "json"}},
                )
                for batch in range(batches):
                    for on in (False, True):
                        if on:
                            plugin.start()
                        for n in range(cycles):
                            created, stopped = _cycle(bed.cri, f"b{batch}-{n}")
                            samples.setdefault((on, "CreateContainer"), []).append(created)
                            samples.setdefault((on, "StopContainer"), []).append(stopped)
                        if on:
                            plugin.terminate()
    except TestbedUnavailable as error:
        return f"Not measured: {error}."
    rows = []
    for call in ("CreateContainer", "StopContainer"):
        off, on_ = summary(samples[False, call]), summary(samples[True, call])
        rows.append((f"CRI {call}", ms(off.p50), ms(off.p99), ms(on_.p50), ms(on_.p99),
                     f"{(on_.p50 - off.p50) * 1e3:+.2f}", f"{on_.p50 / off.p50:.2f}"))  # fmt: skip
    head = ("containerd", "off p50 ms", "off p99", "on p50 ms", "on p99", "p50 more ms", "p50 ×")
    return table(head, rows)
