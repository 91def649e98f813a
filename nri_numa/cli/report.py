"""``nri-numa report``: one archive from which a bug can be understood, and replayed elsewhere."""

from __future__ import annotations

import hashlib
import importlib.metadata
import io
import json
import os
import platform
import re
import secrets
import subprocess
import tarfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import click

from nri_numa import __version__
from nri_numa.cli.agent_client import AgentClient, client, segment
from nri_numa.cli.common import Failure, api_options, config_option, friendly, load, progress
from nri_numa.text import human_bytes

_ASKED: Final = ("status", "assignments", "refusals", "zones", "kubelet", "slots", "notices")
_LOG_LINES: Final = 5000
_PASSWORD: Final = re.compile(r"(?<=://)[^/@\s\"]+(?=@)")
_NAMED: Final = re.compile(r'\b(?:namespace|pod|container|for)(?:="?|":")([^\s"]+)')
"""Names in a line of the log, in either of its forms."""
_MATCHED: Final = re.compile(r'"(?:namespaces|containers)": \[\n.*?\n *\]', re.DOTALL)
"""What the configuration says of names; its other words are not touched: it is to be loaded."""


@click.command()
@click.argument("target", metavar="FILE.tar.gz", type=click.Path(dir_okay=False))
@click.option("--hash-names", is_flag=True, help="Names of pods, namespaces and containers hashed.")
@config_option
@api_options
def report(
    target: str,
    hash_names: bool,
    config_path: str | None,
    api: str | None,
    token_file: str | None,
    ca_file: str | None,
) -> None:
    """Pack what a bug report needs into one archive: look into it before you send it.

    It holds check, configuration (no file that it names, no passwords), versions, the captured
    machine, and of a running agent its status, decisions with explanations, and log. Anyone with
    it replays it: simulate pods.json --machine machine.tar.gz --config config.json
    """
    from nri_numa import config as configuration
    from nri_numa.agent.preflight import examine
    from nri_numa.cli.machine import packed
    from nri_numa.store.files import replace_file

    config = load(config_path)
    texts: dict[str, str] = {}
    with friendly(), progress("asking this node") as at:
        machine = packed(Path(config.sysfs_root))
        documents: dict[str, Any] = {
            "versions": _versions(),
            "config": configuration.effective(config),
            "check": [
                {"subject": f.subject, "level": f.level, "message": f.message, "remedy": f.remedy}
                for f in examine(config)
            ],
        }
        at("asking the agent")
        try:
            documents |= _asked(client(api, token_file, ca_file, config_path))
        except Failure as error:
            texts["agent.txt"] = f"{error.message}\n"
        texts["log.txt"] = _log(config.log.file)
        texts |= {f"{name}.json": json.dumps(one, indent=1) for name, one in documents.items()}
        texts = {name: _PASSWORD.sub("***", text) for name, text in texts.items()}
        if hash_names:
            names = {*_names(documents), *_NAMED.findall(texts["log.txt"])}
            texts = _hashed(texts, {part for name in names for part in name.split("/")})
        members = {name: text.encode("utf-8", "replace") for name, text in texts.items()}
        members["machine.tar.gz"] = machine.data
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:gz") as archive:
        for name, member in sorted(members.items()):
            info = tarfile.TarInfo(name)
            info.size = len(member)
            archive.addfile(info, io.BytesIO(member))
    try:
        os.close(replace_file(target, data.getvalue(), sync=True, mode=0o600))
    except OSError as error:
        raise Failure(f"cannot write {target}: {error.strerror or error}") from error
    size = human_bytes(len(data.getvalue()))
    click.echo(f"{target}: {', '.join(sorted(members))}; {size}")
    if "agent.txt" in members:
        click.echo(f"nri-numa: without the agent's part: {texts['agent.txt'].rstrip()}", err=True)


def _versions() -> dict[str, Any]:
    system = os.uname()
    packages = (f"{one.name} {one.version}" for one in importlib.metadata.distributions())
    try:
        distribution = platform.freedesktop_os_release().get("PRETTY_NAME", "")
    except OSError:
        distribution = ""
    return {
        "nri-numa": __version__,
        "python": platform.python_version(),
        "kernel": f"{system.release} {system.machine}",
        "distribution": distribution,
        "packages": sorted(packages),
    }


def _asked(agent: AgentClient) -> dict[str, Any]:
    """What the agent says by name; each container explained, and its pod to be simulated."""
    found = {name: agent.get(f"/v1/{name}") for name in _ASKED}
    known = sorted(found["assignments"]["containers"], key=lambda one: float(one["since"]))
    explained: list[Any] = []
    pods: dict[tuple[str, str], dict[str, Any]] = {}
    refused = found["refusals"]["refusals"]
    for one in (*known, *refused):
        path = "/".join(segment(one[part]) for part in ("namespace", "pod", "container"))
        try:
            explanations = agent.get(f"/v1/explain/{path}")["explanations"]
        except Failure:  # it ended meanwhile
            explanations = []
        explained += explanations
        if one in refused or one["container"] == "*":  # CPUs kept for containers to come
            continue
        meta = {"namespace": one["namespace"], "name": one["pod"], "annotations": {}}
        pod = pods.setdefault(
            (one["namespace"], one["pod"]),
            {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": {"containers": []}},
        )
        amounts = {"cpu": f"{one['cpuMilli']}m", "memory": one["memoryBytes"]}
        amounts = {name: amount for name, amount in amounts.items() if amount not in ("0m", 0)}
        kind = "limits" if one["qos"] == "Guaranteed" else "requests"
        pod["spec"]["containers"].append({"name": one["container"], "resources": {kind: amounts}})
        for explanation in explanations:
            for asked in (explanation["details"] or {}).get("asked", ()):
                prefix, slash, _ = asked["source"].removeprefix("annotation ").partition("/")
                if slash:
                    key = f"{prefix}/{asked['key']}.{one['container']}"
                    pod["metadata"]["annotations"][key] = asked["value"]
    listed = {"apiVersion": "v1", "kind": "List", "items": list(pods.values())}
    return {**found, "explanations": explained, "pods": listed}


def _log(file: str) -> str:
    """The last lines of the agent's log, from its file or the journal; else why there are none."""
    command = ["tail", f"-n{_LOG_LINES}", file]
    if not file:
        command = ["journalctl", "-u", "nri-numa", f"-n{_LOG_LINES}", "-o", "cat", "--no-pager"]
    try:
        done = subprocess.run(command, capture_output=True, timeout=30, check=False)  # noqa: S603
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"no log here ({error}); of a pod: kubectl logs\n"
    return (done.stdout or done.stderr).decode("utf-8", "replace")


def _names(document: object, key: str = "") -> Iterator[str]:
    """All namespaces, pods and containers of a document."""
    if isinstance(document, str):
        if document and key in ("namespace", "pod", "container"):
            yield document
    elif isinstance(document, dict):
        for name, value in document.items():
            of_pod = name == "name" and "namespace" in document
            yield from _names(value, "pod" if of_pod else name)
    elif isinstance(document, list):
        for value in document:
            yield from _names(value, key)


def _hashed(texts: dict[str, str], names: Iterable[str]) -> dict[str, str]:
    """The texts with each name, as a word and no key of JSON, as a hash that is new each time.

    A key of an annotation ends with the name of a container, and is not one as a whole.
    """
    salt = secrets.token_bytes(16)
    words = "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True))
    if not words:
        return texts
    pattern = re.compile(rf'(?<![\w-])(?!(?<=")(?:{words})":)(?:{words})(?![\w-])')

    def shown(found: re.Match[str]) -> str:
        return "x" + hashlib.blake2b(found[0].encode(), key=salt, digest_size=5).hexdigest()

    def hashed(found: re.Match[str]) -> str:
        return pattern.sub(shown, found[0])

    return {
        name: _MATCHED.sub(hashed, text) if name == "config.json" else pattern.sub(shown, text)
        for name, text in texts.items()
    }
