"""``nri-numa report``: an archive that describes a bug and replays it on another machine."""

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
from msgspec import to_builtins

from nri_numa import __version__
from nri_numa.cli.agent_client import AgentClient, new_agent_client, quote_path_segment
from nri_numa.cli.common import (
    Failure,
    api_options,
    config_option,
    load_command_config,
    show_progress,
    translate_errors,
)
from nri_numa.text import human_bytes

_API_DOCUMENTS: Final = (
    "status",
    "assignments",
    "rejections",
    "zones",
    "kubelet",
    "slots",
    "notices",
)
_MAX_LOG_LINES: Final = 5000
_URL_PASSWORD_PATTERN: Final = re.compile(r"(?<=://)[^/@\s\"]+(?=@)")
_LOGGED_NAME_PATTERN: Final = re.compile(r'\b(?:namespace|pod|container|for)(?:="?|":")([^\s"]+)')
"""Names in a log line, in logfmt or JSON."""
_NAME_LIST_IN_CONFIG: Final = re.compile(r'"(?:namespaces|containers)": \[\n.*?\n *\]', re.DOTALL)
"""Names in the configuration; the rest is not hashed, so it can still be loaded."""


@click.command("report")
@click.argument("target", metavar="FILE.tar.gz", type=click.Path(dir_okay=False))
@click.option(
    "--hash-names", is_flag=True, help="Replace names of pods, namespaces and containers by hashes."
)
@config_option
@api_options
def pack_report(
    target: str,
    hash_names: bool,
    config_path: str | None,
    api: str | None,
    token_file: str | None,
    ca_file: str | None,
) -> None:
    """Pack what a bug report needs into one archive. Look into it before you send it.

    It has the output of check, the configuration (no file that it names, no passwords), versions,
    the captured machine, and of a running agent its status, explained decisions and log. Anyone who
    has it can replay it: simulate pods.json --machine machine.tar.gz --config config.json
    """
    from nri_numa import config as configuration
    from nri_numa.agent.preflight import read_config_in_effect, run_checks
    from nri_numa.cli.machine import build_capture
    from nri_numa.store.files import replace_file

    config = load_command_config(config_path)
    texts: dict[str, str] = {}
    with translate_errors(), show_progress("asking this node") as status:
        machine = build_capture(Path(config.sysfs_root))
        documents: dict[str, Any] = {
            "versions": _collect_versions(),
            "config": configuration.effective_document(read_config_in_effect(config)),
            "check": to_builtins(list(run_checks(config))),
        }
        status("asking the agent")
        try:
            documents |= _fetch_documents(new_agent_client(api, token_file, ca_file, config_path))
        except Failure as error:
            texts["agent.txt"] = f"{error.message}\n"
        texts["log.txt"] = _read_log_tail(config.log.file)
        texts |= {f"{name}.json": json.dumps(d, indent=1) for name, d in documents.items()}
        texts = {name: _URL_PASSWORD_PATTERN.sub("***", text) for name, text in texts.items()}
        if hash_names:
            names = {*_names_in_document(documents)}
            names.update(_LOGGED_NAME_PATTERN.findall(texts["log.txt"]))
            texts = _hash_names(texts, {part for name in names for part in name.split("/")})
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


def _collect_versions() -> dict[str, Any]:
    system = os.uname()
    packages = (f"{d.name} {d.version}" for d in importlib.metadata.distributions())
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


def _fetch_documents(agent: AgentClient) -> dict[str, Any]:
    """Fetch the agent's documents by name, all explanations, and pods for a simulation."""
    documents = {name: agent.get_document(f"/v1/{name}") for name in _API_DOCUMENTS}
    running = sorted(documents["assignments"]["containers"], key=lambda c: float(c["assignedAt"]))
    explained: list[Any] = []
    pods: dict[tuple[str, str], dict[str, Any]] = {}
    rejections = documents["rejections"]["rejections"]
    for item in (*running, *rejections):
        path = "/".join(
            quote_path_segment(item[part]) for part in ("namespace", "pod", "container")
        )
        try:
            explanations = agent.get_document(f"/v1/explain/{path}")["explanations"]
        except Failure:  # it ended meanwhile
            explanations = []
        explained += explanations
        if item in rejections or item["container"] == "*":  # a pod reservation
            continue
        meta = {"namespace": item["namespace"], "name": item["pod"], "annotations": {}}
        pod = pods.setdefault(
            (item["namespace"], item["pod"]),
            {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": {"containers": []}},
        )
        amounts = {"cpu": f"{item['cpuMilli']}m", "memory": item["memoryBytes"]}
        amounts = {name: amount for name, amount in amounts.items() if amount not in ("0m", 0)}
        kind = "limits" if item["qos"] == "Guaranteed" else "requests"
        pod["spec"]["containers"].append({"name": item["container"], "resources": {kind: amounts}})
        for explanation in explanations:
            for option in (explanation["details"] or {}).get("options", ()):
                prefix, slash, _ = option["source"].removeprefix("annotation ").partition("/")
                if slash:
                    key = f"{prefix}/{option['key']}.{item['container']}"
                    pod["metadata"]["annotations"][key] = option["value"]
    listed = {"apiVersion": "v1", "kind": "List", "items": list(pods.values())}
    return {**documents, "explanations": explained, "pods": listed}


def _read_log_tail(file: str) -> str:
    """Return the last lines of the agent's log, from file or journal, or why there are none."""
    command = ["tail", f"-n{_MAX_LOG_LINES}", file]
    if not file:
        command = ["journalctl", "-u", "nri-numa", f"-n{_MAX_LOG_LINES}", "-o", "cat", "--no-pager"]
    try:
        process = subprocess.run(command, capture_output=True, timeout=30, check=False)  # noqa: S603
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"no log here ({error}); of a pod: kubectl logs\n"
    return (process.stdout or process.stderr).decode("utf-8", "replace")


def _names_in_document(document: object, key: str = "") -> Iterator[str]:
    """Yield all namespaces, pods and containers of a document."""
    if isinstance(document, str):
        if document and key in ("namespace", "pod", "container"):
            yield document
    elif isinstance(document, dict):
        for name, value in document.items():
            of_pod = name == "name" and "namespace" in document
            yield from _names_in_document(value, "pod" if of_pod else name)
    elif isinstance(document, list):
        for value in document:
            yield from _names_in_document(value, key)


def _hash_names(texts: dict[str, str], names: Iterable[str]) -> dict[str, str]:
    """Replace each name in the texts by a hash with a new salt; keys of JSON stay.

    The key of an annotation may end with a container's name; the name is replaced, as in values.
    """
    salt = secrets.token_bytes(16)
    alternatives = "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True))
    if not alternatives:
        return texts
    pattern = re.compile(rf'(?<![\w-])(?!(?<=")(?:{alternatives})":)(?:{alternatives})(?![\w-])')

    def hash_name(match: re.Match[str]) -> str:
        return "x" + hashlib.blake2b(match[0].encode(), key=salt, digest_size=5).hexdigest()

    def hash_match(match: re.Match[str]) -> str:
        return pattern.sub(hash_name, match[0])

    hashed = {name: pattern.sub(hash_name, text) for name, text in texts.items()}
    return hashed | {"config.json": _NAME_LIST_IN_CONFIG.sub(hash_match, texts["config.json"])}
