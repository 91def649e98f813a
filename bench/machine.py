"""What the figures were measured on."""

from __future__ import annotations

import os
import platform
from pathlib import Path


def describe() -> str:
    """CPU, cores, kernel, Python and load; one line each, without anything that names the host."""
    model = "unknown"
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    virtual = any(
        line.startswith("flags") and " hypervisor" in line
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    )
    return "\n".join(
        (
            f"- CPU: {model}, {os.cpu_count()} CPUs{' of a virtual machine' if virtual else ''}",
            f"- kernel {platform.release()}, Python {platform.python_version()}",
            f"- load average {load()}",
        )
    )


def load() -> str:
    """Load average of 1, 5 and 15 minutes."""
    return ", ".join(f"{value:.1f}" for value in os.getloadavg())
