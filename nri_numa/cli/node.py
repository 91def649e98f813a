"""Commands about this node: ``check`` it, show its ``checkpoint``, ``release`` its containers."""

from __future__ import annotations

import itertools
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
from msgspec import to_builtins

from nri_numa.cli.common import (
    Failure,
    InputError,
    Unreachable,
    command_line_settings,
    config_error_message,
    config_option,
    listing_option,
    load_command_config,
    nri_socket_setting,
    old_options,
    output_option,
    show_progress,
    state_dir_setting,
    sysfs_setting,
    translate_errors,
)
from nri_numa.cli.common import find_config_path as default_path
from nri_numa.cli.output import (
    TABLE_FORMATS,
    CellWrapping,
    Column,
    human_age,
    render_table,
    wrap_text,
    write_document,
    write_document_or_lines,
)
from nri_numa.errors import CheckpointCorrupt, CheckpointError, CheckpointTooNew, ConfigError
from nri_numa.model.machine import count_text
from nri_numa.text import escape_unprintable

if TYPE_CHECKING:
    from nri_numa.agent.preflight import Finding
    from nri_numa.agent.release import ReleasedContainer, ReleaseReport
    from nri_numa.nri.runtime_config import FileChange
    from nri_numa.runtime_profile import RuntimeFiles

_CONTAINER_NAME_HEADINGS: Final = ("NAMESPACE", "POD", "CONTAINER")
_CPUSET_COLUMNS: Final = (Column("CPUS", CellWrapping.LIST), Column("MEMS", CellWrapping.LIST))

_NEW_OPTION_OF: Final = {"--fix-containerd": "--fix-runtime"}
"""By old option, the one that replaced it. Deleted with the first release."""
_LEVEL_MARKS = {"ok": ("ok  ", "green"), "warn": ("warn", "yellow"), "fail": ("FAIL", "red")}


@click.command()
@config_option
@nri_socket_setting
@state_dir_setting
@sysfs_setting
@click.option(
    "--fix-runtime",
    is_flag=True,
    help="Show how to turn NRI on in the configuration of containerd or CRI-O.",
)
@click.option("--write", is_flag=True, help="With --fix-runtime: write it, and keep a backup.")
@click.option(
    "--containerd-config",
    metavar="FILE",
    help="With --fix-runtime: containerd's configuration, if it is elsewhere.",
)
@old_options(_NEW_OPTION_OF)
@click.option("--show-config", is_flag=True, help="Also show the effective configuration.")
@output_option()
@click.pass_context
def check(
    ctx: click.Context,
    config_path: str | None,
    fix_runtime: bool,
    write: bool,
    containerd_config: str | None,
    show_config: bool,
    output: str,
) -> None:
    """Check if this machine is ready, and show what to do.

    Each line is ok, warn or FAIL, in this order; a summary is the last line. The exit code is 0 if
    no check failed, 1 if one failed, and 2 if the configuration has mistakes.
    """
    if fix_runtime:
        if containerd_config is None:
            from nri_numa.agent.preflight import read_runtime_endpoint

            endpoint = read_runtime_endpoint(load_command_config(config_path))
            fix_runtime_config(kubelet_endpoint=endpoint, write=write)
        else:
            _fix_containerd_config(containerd_config, write=write)
        return
    if write:
        raise click.UsageError("--write goes with --fix-runtime")
    from nri_numa import config as configuration
    from nri_numa.agent.preflight import (
        Finding,
        FindingLevel,
        read_config_in_effect,
        run_checks,
        worst_level,
    )

    path = default_path(config_path)
    try:
        config = configuration.load_config(path, os.environ, command_line_settings())
    except ConfigError as error:
        if output == "table":
            raise InputError(config_error_message(error)) from error
        findings = [
            Finding(subject="configuration", level=FindingLevel.FAIL, message=problem)
            for problem in error.problems
        ]
        write_document({"ready": False, "findings": to_builtins(findings), "config": None}, output)
        ctx.exit(2)
    with (
        translate_errors(),
        show_progress("looking at this node"),
    ):  # a state directory has a line of its own
        findings = sorted(run_checks(config), key=lambda one: list(FindingLevel).index(one.level))
    passed = worst_level(findings) is not FindingLevel.FAIL
    effective = configuration.effective_document(read_config_in_effect(config))
    document = {"ready": passed, "findings": to_builtins(findings), "config": effective}
    if show_config and output == "table":
        source = path or "built-in defaults"
        click.echo(f"# Effective configuration ({source}, environment and flags):")
        write_document(effective, "yaml")
        click.echo()
    write_document_or_lines(
        document, output, [*_finding_lines(findings), "", _summary_line(findings)]
    )
    if not passed:
        config_failed = any(f.subject == "configuration" and f.level == "fail" for f in findings)
        ctx.exit(2 if config_failed else 1)


def fix_runtime_config(
    root: Path = Path("/"), *, kubelet_endpoint: str = "", write: bool = False
) -> None:
    """Show or write the configuration that turns NRI on in the kubelet's runtime.

    Raises:
        Failure: neither runtime is here, or this one has no NRI or is set up by a distribution.
        InputError: a file cannot be edited, or does not decide.
    """
    from nri_numa.nri import runtime_config
    from nri_numa.runtime_profile import CONTAINERD_FILES, CRI_O_FILES

    runtimes = runtime_config.find_runtimes(root)
    files = runtime_config.choose_runtime(runtimes, kubelet_endpoint)
    if files is CRI_O_FILES:
        _fix_crio_config(root, write=write)
    elif files is CONTAINERD_FILES or runtime_config.find_containerd_distribution(root):
        _fix_containerd_config(str(root / CONTAINERD_FILES.config[1:]), root, write=write)
    elif runtimes:
        found = " and ".join(f"{each.files.title} ({each.evidence})" for each in runtimes)
        raise Failure(f"{found} are here; stop the one that Kubernetes does not use first")
    elif "KUBERNETES_SERVICE_HOST" in os.environ:
        raise Failure("this pod does not see its node's runtime; run this on the node")
    else:
        raise Failure("neither containerd nor CRI-O is here, so there is nothing to fix")


def _fix_crio_config(root: Path, *, write: bool) -> None:
    from nri_numa.nri import crio_config
    from nri_numa.nri.runtime_config import nri_unsupported_reason
    from nri_numa.runtime_profile import CRI_O_FILES

    if problem := nri_unsupported_reason(CRI_O_FILES, root):
        raise Failure(f"{problem}; install a newer one, or set runtime.link: cri")
    change = _plan_change(partial(crio_config.plan_fix, root))
    if change is not None and write and crio_config.is_written_by_openshift(root):
        raise Failure(f"{crio_config.OPENSHIFT_HINT}:\n{change.text}")
    _show_or_write_change(change, CRI_O_FILES, CRI_O_FILES.config, write=write)


def _fix_containerd_config(config: str, root: Path = Path("/"), *, write: bool) -> None:
    """Show or write the configuration that turns NRI on in containerd.

    Raises:
        Failure: this containerd has no NRI, or the file is a distribution's or on another system.
        InputError: the file cannot be edited.
    """
    from nri_numa.nri import runtime_config
    from nri_numa.runtime_profile import CONTAINERD_FILES

    section = CONTAINERD_FILES.nri_section
    if problem := runtime_config.nri_unsupported_reason(CONTAINERD_FILES, root):
        raise Failure(f"{problem}; install a newer one, or set runtime.link: cri")
    if (distribution := runtime_config.find_containerd_distribution(root)) and config == str(
        root / CONTAINERD_FILES.config[1:]
    ):
        raise Failure(f"{distribution.nri_enabling_hint}:\n{section}")
    if "KUBERNETES_SERVICE_HOST" in os.environ and not os.path.exists(config):
        raise Failure(f"this pod does not see {config}; in that file of the node set:\n{section}")
    change = _plan_change(partial(runtime_config.plan_fix, Path(config)))
    _show_or_write_change(change, CONTAINERD_FILES, config, write=write)


def _plan_change(plan: Callable[[], FileChange | None]) -> FileChange | None:
    try:
        return plan()
    except OSError as error:
        raise Failure(f"{error.filename}: {error.strerror}") from error
    except ValueError as error:
        raise InputError(str(error)) from error


def _show_or_write_change(
    change: FileChange | None, files: RuntimeFiles, config: str, *, write: bool
) -> None:
    restart = (
        f"Then restart it: systemctl restart {files.program}. Running containers are not touched."
    )
    if change is None:
        click.echo(f"{config} turns NRI on already.")
        return
    if not write:
        click.echo(f"# {change.path}")
        click.echo(change.excerpt, nl=False)
        click.echo()
        click.echo(f"# --write writes this and keeps a backup. {restart}")
        return
    try:
        backup = _write_with_backup(change)
    except OSError as error:
        raise Failure(f"{change.path}: {error.strerror or error}") from error
    click.echo(f"{change.path} written{f', the old one is {backup}' if backup else ''}. {restart}")


def _write_with_backup(change: FileChange) -> Path | None:
    """Write the file; return the backup of the old one, if there was one."""
    from nri_numa.store.files import replace_file

    path, backup, mode = change.path, None, 0o644
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        mode = path.stat().st_mode & 0o7777
        names = (
            path.with_name(f"{path.name}.backup{number or ''}") for number in itertools.count()
        )
        backup = next(name for name in names if not name.exists())
        backup.write_bytes(path.read_bytes())
        backup.chmod(mode)
    os.close(replace_file(os.path.realpath(path), change.text.encode(), sync=True, mode=mode))
    return backup


def _finding_lines(findings: list[Finding]) -> Iterator[str]:
    for finding in findings:
        mark, colour = _LEVEL_MARKS[finding.level]
        line, *other_lines = wrap_text(f"{mark}  {finding.subject}: {finding.message}", "", " " * 6)
        yield click.style(line[:4], fg=colour) + line[4:]
        yield from other_lines
        if finding.remedy:
            yield from wrap_text(f"→ {finding.remedy}", " " * 6, " " * 8)


def _summary_line(findings: list[Finding]) -> str:
    count = Counter(finding.level.value for finding in findings)
    failed = f"{count['fail']} failed" if count["fail"] else "Ready"
    return f"{failed}, {count_text(count['warn'], 'warning')}" if count["warn"] else failed


@click.command()
@click.argument("file", metavar="[FILE]", required=False, type=click.Path())
@config_option
@state_dir_setting
@listing_option
@click.pass_context
def checkpoint(ctx: click.Context, file: str | None, config_path: str | None, output: str) -> None:
    """Show the saved state: the assignment of each container when it was last written.

    It works while the agent runs. Exit code 1 if the checkpoint is damaged, 3 if there is none.
    """
    from nri_numa.store.checkpoint import CHECKPOINT_FILE_NAME

    path = (
        Path(file)
        if file
        else Path(load_command_config(config_path).state_dir, CHECKPOINT_FILE_NAME)
    )
    with suppress(OSError):  # reading the file reports the reason
        if file and not path.exists():
            usual = Path(load_command_config(config_path).state_dir, CHECKPOINT_FILE_NAME)
            hint = f"expected a checkpoint such as {usual}"
            raise Unreachable(f"{file}: there is no such file; {hint}")
    with show_progress(f"reading {path}"):
        document = _read_checkpoint(path)
    write_document_or_lines(document, output, _checkpoint_lines(path, document))
    problems = document["problems"]
    for problem in problems:
        click.echo(f"nri-numa: {escape_unprintable(problem)}", err=True)
    if problems:
        ctx.exit(1)


def _read_checkpoint(path: Path) -> dict[str, Any]:
    from nri_numa.store import checkpoint as store
    from nri_numa.store.journal import state_from

    try:
        loaded = store.read_checkpoint(str(path))
    except (CheckpointCorrupt, CheckpointTooNew) as error:
        raise Failure(escape_unprintable(str(error))) from error
    except CheckpointError as error:
        raise Unreachable(escape_unprintable(str(error))) from error
    state, damaged = state_from(loaded.entries)
    return {
        "file": str(path),
        "writtenBy": loaded.head,
        "writtenAt": loaded.written_at,
        "records": loaded.records,
        "containers": [
            {
                "id": a.container_id,
                "podUID": a.pod_uid,
                "namespace": a.namespace,
                "pod": a.pod,
                "container": a.container,
                "kind": a.kind.value,
                "cpus": str(a.cpus),
                "mems": str(a.mems),
                "numaNodes": str(a.numa_nodes),
                "policy": a.policy.value,
                "assignedAt": a.assigned_at,
                "reason": a.reason,
            }
            for a in sorted(
                state.allocations.values(),
                key=lambda a: (a.namespace, a.pod, a.container, a.container_id),
            )
        ],
        "problems": [*loaded.problems, *damaged],
    }


def _checkpoint_lines(path: Path, document: dict[str, Any]) -> Iterator[str]:
    now = time.time()  # commands may read the clock
    written = document["writtenAt"]
    age = f", compacted {human_age(written, now)} ago" if written else ""
    version = document["writtenBy"].get("version", "?")
    yield escape_unprintable(f"{path}: {document['records']} records by version {version}{age}")
    if not document["containers"]:
        yield "No containers."
        return
    cpus, mems = Column("CPUS OR NUMA NODES", CellWrapping.LIST), _CPUSET_COLUMNS[1]
    yield from render_table(
        (*_CONTAINER_NAME_HEADINGS, Column("KIND"), cpus, mems, Column("AGE")),
        [
            (
                *(c[key] for key in ("namespace", "pod", "container", "kind")),
                c["cpus"] or c["numaNodes"] or "any",
                c["mems"] or "any",
                human_age(c["assignedAt"], now),
            )
            for c in document["containers"]
        ],
    )


@click.command()
@config_option
@nri_socket_setting
@state_dir_setting
@sysfs_setting
@click.option("--dry-run", is_flag=True, help="Show what would be done, and change nothing.")
@click.option(
    "--timeout",
    metavar="SECONDS",
    type=click.FloatRange(min=1),
    default=60.0,
    show_default=True,
    help="Maximum time until the runtime synchronizes.",
)
@click.option(
    "--stay", is_flag=True, help="Wait at the end until stopped, as the pod of a DaemonSet must."
)
@listing_option
@click.pass_context
def release(
    ctx: click.Context,
    config_path: str | None,
    dry_run: bool,
    timeout: float,
    stay: bool,
    output: str,
) -> None:
    """Give every container back what it would have without nri-numa.

    Each gets all CPUs and all memory nodes of the machine, and a container with exclusive CPUs gets
    its CPU limit back. Containers that other programs pinned stay as they are.

    Stop the agent first: if one runs, it is named and nothing is changed. A second run does no
    harm. Exit code 1 if an agent runs or a container could not be released, 3 if the runtime cannot
    be reached.
    """
    import asyncio
    import signal

    from nri_numa.agent import release as releasing
    from nri_numa.agent.build import checkpoint_identity

    config = load_command_config(config_path)
    stop_signals = (signal.SIGTERM, signal.SIGINT)
    if stay and dry_run:
        raise click.UsageError("--stay goes with a real release, not with --dry-run")
    with translate_errors(), show_progress("asking the runtime") as status:
        report = asyncio.run(
            releasing.release_all_containers(
                config,
                identity=checkpoint_identity(config),
                dry_run=dry_run,
                timeout=timeout,
                on_delay=lambda: status("waiting for the runtime, which lets containers end first"),
            )
        )
    write_document_or_lines(
        _release_document(report, dry_run), output, _release_report_lines(report, dry_run)
    )
    for c in report.containers:
        if c.note and output in TABLE_FORMATS:
            name = escape_unprintable(f"{c.namespace}/{c.pod}/{c.container}")
            click.echo(f"nri-numa: {name}: {c.note}", err=True)
    for problem in report.problems:
        click.echo(f"nri-numa: {escape_unprintable(problem)}", err=True)
    if not report.is_complete:
        ctx.exit(1)
    if stay:
        click.echo("Waiting to be stopped.", err=True)
        # Blocked first: process 1 of a container gets no signal without a handler.
        signal.pthread_sigmask(signal.SIG_BLOCK, stop_signals)
        signal.sigwait(stop_signals)


def _release_document(report: ReleaseReport, dry_run: bool) -> dict[str, Any]:
    return {
        "dryRun": dry_run,
        "released": report.is_complete and not dry_run,
        "checkpoint": report.checkpoint,
        "containers": [
            {
                "id": c.container_id,
                "namespace": c.namespace,
                "pod": c.pod,
                "container": c.container,
                "result": c.result.value,
                "before": {"cpus": c.had_cpus, "mems": c.had_mems},
                "after": {"cpus": c.cpus, "mems": c.mems, "quota": c.quota},
                "note": c.note,
            }
            for c in report.containers
        ],
        "problems": list(report.problems),
    }


def _release_report_lines(report: ReleaseReport, dry_run: bool) -> Iterator[str]:
    from nri_numa.agent.release import ReleaseResult

    changed = [c for c in report.containers if c.has_changes]
    if changed:
        head = (*_CONTAINER_NAME_HEADINGS, *_CPUSET_COLUMNS, Column("LIMIT"), Column("RESULT"))
        yield from render_table(head, [_container_row(c) for c in changed])
        yield ""
    count = Counter(c.result for c in report.containers)
    n = count[ReleaseResult.RELEASED] + count[ReleaseResult.RECORDED]
    parts = [f"{count[ReleaseResult.PLANNED]} would be released" if dry_run else f"{n} released"]
    if count[ReleaseResult.FAILED]:
        parts.append(f"{count[ReleaseResult.FAILED]} failed, run it again")
    parts.append(f"{count[ReleaseResult.FREE]} already unrestricted")
    parts.append(f"{count[ReleaseResult.FOREIGN]} not managed by nri-numa")
    yield f"{'; '.join(parts)}."
    if report.checkpoint:
        yield f"The checkpoint is kept as {escape_unprintable(report.checkpoint)}."


def _quota_text(c: ReleasedContainer) -> str:
    if c.is_quota_read or c.result.value == "planned":
        return "back"
    return "not back" if c.result.value == "failed" else "sent"


def _container_row(c: ReleasedContainer) -> tuple[str, ...]:
    return (
        c.namespace,
        c.pod,
        c.container,
        f"{c.had_cpus} → {c.cpus}" if c.cpus else "-",
        f"{c.had_mems} → {c.mems}" if c.mems else "-",
        "-" if c.quota is None else _quota_text(c),
        c.result.value,
    )
