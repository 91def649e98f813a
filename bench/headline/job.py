"""A training job: ``python job.py SECONDS``, with nothing but numpy, in a container.

A network of two layers learns a function of 32 numbers by stochastic gradient descent. It prints
one line of JSON: whole epochs and how long they took, the loss before and after, and as the kernel
counts it the time that it ran and that it waited for a CPU.
"""

import json
import os
import sys
import time

import numpy

SAMPLES, INPUTS, HIDDEN, BATCH, RATE = 2048, 32, 64, 64, 0.05


def schedule() -> tuple[int, int] | None:
    """Nanoseconds that this process ran and waited; None where the kernel does not tell."""
    try:
        with open("/proc/self/schedstat") as file:
            ran, waited, _ = file.read().split()
    except OSError:
        return None
    return int(ran), int(waited)


def main(seconds: float) -> None:
    rng = numpy.random.default_rng(7)
    x = rng.standard_normal((SAMPLES, INPUTS))
    y = numpy.sin(x @ rng.standard_normal((INPUTS, 1)) / 3)
    w1 = rng.standard_normal((INPUTS, HIDDEN)) / INPUTS**0.5
    w2 = rng.standard_normal((HIDDEN, 1)) / HIDDEN**0.5

    def loss() -> float:
        return float(numpy.mean((numpy.tanh(x @ w1) @ w2 - y) ** 2))

    def epoch() -> None:
        nonlocal w1, w2
        order = rng.permutation(SAMPLES)
        for begin in range(0, SAMPLES, BATCH):
            part = order[begin : begin + BATCH]
            hidden = numpy.tanh(x[part] @ w1)
            error = 2 * (hidden @ w2 - y[part]) / len(part)
            back = (error @ w2.T) * (1 - hidden**2)
            w2 = w2 - RATE * hidden.T @ error
            w1 = w1 - RATE * x[part].T @ back

    before = loss()
    epoch()  # the first touches everything for the first time
    at_first, cpu_at_first, epochs = schedule(), time.process_time(), 0
    begun = time.perf_counter()
    while (taken := time.perf_counter() - begun) < seconds:
        epoch()
        epochs += 1
    at_last, cpu = schedule(), time.process_time() - cpu_at_first
    waited = None
    if at_first is not None and at_last is not None:
        waited = (at_last[1] - at_first[1]) / 1e9
    print(
        json.dumps(
            {
                "epochs": epochs,
                "seconds": taken,
                "cpuSeconds": cpu,
                "waitedSeconds": waited,
                "lossBefore": before,
                "lossAfter": loss(),
                "cpus": sorted(os.sched_getaffinity(0)),
            }
        ),
        flush=True,
    )
    time.sleep(1_000_000)  # the container stays until it is stopped


if __name__ == "__main__":
    main(float(sys.argv[1]))
