"""What a user waits for beside neighbours, on cgroup v2: of ``bench/neighbours.py --machine``."""

import json
import os
from pathlib import Path

from tests.vm.guest import Guest
from tests.vm.registry import case


@case(applies=lambda machine: False, plugin=False, limit_s=24 * 3600)
def neighbours(guest: Guest) -> None:
    """Nothing: it measures, in a machine that bench/neighbours.py boots."""
    from bench.neighbours import ASKED, measured

    counts, passes = json.loads(os.environ[ASKED])
    directory = Path("/run/bench")
    directory.mkdir(exist_ok=True)
    guest.notes += measured(guest.containerd, directory, counts=counts, passes=passes).splitlines()
