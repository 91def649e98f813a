"""A shell with ``kubectl`` against a real Kubernetes of one node that runs nri-numa.

    make kube

Builds Kubernetes first where the cache does not have it. The end of the shell ends everything.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import yaml

from tests.beds.kube.bed import KubeBed
from tests.beds.kube.manifests import EXCLUSIVE, asks, container, pod
from tests.beds.plugin_process import REPOSITORY
from tests.beds.testbed import TestbedUnavailable
from tests.machines.cpus import LAST, NO_CPU

_EXAMPLES = {
    "listed": pod("listed", annotations=asks(numacpu=LAST, numamem="0")),
    "exclusive": pod("exclusive", container(cpus="1"), annotations=EXCLUSIVE),
    "ordinary": pod("ordinary"),
    "refused": pod("refused", annotations=asks(numacpu=NO_CPU)),
}


def _hints(bed: KubeBed) -> str:
    return f"""\
Kubernetes with one node, containerd and nri-numa. Try, one after the other:

  kubectl apply -f listed.yaml -f ordinary.yaml
  kubectl wait --for=condition=Ready pod --all
  kubectl logs listed                   # what its first process might use when it began
  kubectl exec listed -- busybox grep allowed_list /proc/self/status
  nri-numa status                       # who is where, and what is free
  nri-numa explain default/listed       # and why

  kubectl apply -f exclusive.yaml       # a CPU of its own, which all others lose:
  nri-numa status
  kubectl apply -f refused.yaml         # a CPU that this machine does not have;
  kubectl describe pod refused          # a second later: why, at the end of its events

http://{bed.node.plugin.address}/ is the page of nri-numa.

The only image is {_EXAMPLES["listed"]["spec"]["containers"][0]["image"]}; there is no way out to
others. Examples are in {bed.directory / "examples"}, logs in {bed.control.log_directory}.
The end of this shell ends all of it."""


def _prepare(bed: KubeBed) -> tuple[Path, dict[str, str]]:
    """The shell's folder, with examples in it, and its environment."""
    examples, programs = bed.directory / "examples", bed.directory / "bin"
    for directory in (examples, programs):
        directory.mkdir()
    for name, document in _EXAMPLES.items():
        # By way of JSON: equal parts are not written as anchors.
        text = yaml.safe_dump(json.loads(json.dumps(document)), sort_keys=False)
        (examples / f"{name}.yaml").write_text(text, encoding="utf-8")
    # A person's shell stays in the machine's own network, where the page is; kubectl goes inside.
    bed.control.write_kubectl(programs)
    path = f"{programs}:{REPOSITORY / '.venv/bin'}:{os.environ.get('PATH', '')}"
    return examples, {
        **os.environ,
        "PATH": path,
        "KUBECONFIG": str(bed.control.kubeconfig("admin")),
        "NRI_NUMA_API": bed.node.plugin.address,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the bed, and a shell or one command in front of it."""
    parser = argparse.ArgumentParser(prog="python -m tests.kube", description=__doc__)
    parser.add_argument("--config", type=Path, help="configuration file of nri-numa")
    parser.add_argument("command", nargs="*", help="instead of a shell")
    options = parser.parse_args(arguments)
    plugin = yaml.safe_load(options.config.read_text()) if options.config else None
    begin = time.monotonic()
    # A terminal that is closed must not leave it all.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    print("starting Kubernetes, containerd and nri-numa: 20 seconds or so", file=sys.stderr)
    try:
        with KubeBed(plugin=plugin) as bed:
            examples, environment = _prepare(bed)
            print(f"ready after {time.monotonic() - begin:.0f} s\n{_hints(bed)}", file=sys.stderr)
            command = options.command or [os.environ.get("SHELL") or "/bin/sh"]
            return subprocess.run(command, cwd=examples, env=environment, check=False).returncode
    except TestbedUnavailable as error:
        print(f"error: {error.what}\nremedy: {error.remedy}", file=sys.stderr)
        return 3
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    raise SystemExit(main())
