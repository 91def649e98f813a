"""A report says what happened on a node, replays elsewhere, and keeps names to itself."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nri_numa.demo.runtime import PodOperationFailed
from tests.beds.embedded_node import EmbeddedNode, until
from tests.beds.plugin_process import plugin_environment
from tools.build_image import unpack


def nri_numa(*arguments: object) -> str:
    command = [sys.executable, "-m", "nri_numa", *map(str, arguments)]
    return subprocess.run(
        command, env=plugin_environment(), capture_output=True, text=True, check=True
    ).stdout


def unpacked(archive: Path, into: Path) -> dict[str, Any]:
    unpack(archive, into)
    return {path.stem: json.loads(path.read_text()) for path in into.glob("*.json")}


def test_a_report_is_replayed_elsewhere_and_keeps_names_and_passwords(tmp_path: Path) -> None:
    address = "http://reader:hunter2@prometheus.example"
    asked = {"url": address, "query": "up"}
    with EmbeddedNode(tmp_path, config={"controller": {"prometheus": asked}}) as node:
        node.start()
        own = node.owner("orders-db", 3)
        with pytest.raises(PodOperationFailed, match="exclusive CPUs"):
            node.run("too-big", {"policy": "single-numa-node"}, cpus=33)
        until(node.plugin.responsive, "it serves")
        # As if it logged to a file; the bed reads what it writes to standard error.
        config = json.loads(node.plugin.config_file.read_text())
        log = tmp_path / "lines"
        log.write_text(
            node.plugin.log_file.read_text() + '{"msg":"gone","pod":"shop/orders-old"}\n'
        )
        config |= {"log": {"file": str(log)}, "sysfsRoot": str(node.sysfs_root)}
        (tmp_path / "logging.yaml").write_text(json.dumps(config))
        for name, more in (("open", ()), ("hashed", ("--hash-names",))):
            given = (f"--config={tmp_path}/logging.yaml", f"--api={node.plugin.address}")
            nri_numa("report", tmp_path / f"{name}.tar.gz", *given, *more)
    told = unpacked(tmp_path / "open.tar.gz", tmp_path / "open")
    assert {"check", "config", "versions", "status", "rejections", "notices"} <= told.keys()
    (rejected,) = told["rejections"]["rejections"]
    assert rejected["pod"] == "too-big"
    assert "orders-db" in (tmp_path / "open" / "log.txt").read_text()
    assert own.cpus == told["assignments"]["containers"][0]["cpus"]
    unpacked(tmp_path / "hashed.tar.gz", tmp_path / "hashed")
    # A maintainer gets the same CPUs for the same pods on the captured machine.
    for here in (tmp_path / "open", tmp_path / "hashed"):
        given = (f"--machine={here}/machine.tar.gz", f"--config={here}/config.json", "-o", "json")
        assert f'"{own.cpus}"' in nri_numa("simulate", here / "pods.json", *given)
    for path in (tmp_path / "hashed").glob("*[nt]"):
        # The bed makes ids of containers from names; a runtime does not.
        assert not re.search(r"(?<![\w-])orders-(db|old)(?![\w-])", path.read_text())
        assert "hunter2" not in path.read_text()
