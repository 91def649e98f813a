"""What the commands share: options, failures, tables, output forms."""

from __future__ import annotations

import os
import re
import sys
import threading
import time
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

import click
from click.shell_completion import get_completion_class

from nri_numa.errors import AgentError, ConfigError
from nri_numa.text import harmless

if TYPE_CHECKING:
    from nri_numa.config import AgentConfig


DEFAULT_CONFIG = "/etc/nri-numa/agent.yaml"
WIDTH = 80

Function = TypeVar("Function", bound=Callable[..., Any])


class Failure(click.ClickException):
    """The command failed; exit code 1."""

    exit_code = 1

    def show(self, file: Any = None) -> None:
        """Write the message to standard error."""
        click.echo(f"nri-numa: {self.message}", err=True, file=file)


class Mistake(Failure):
    """The configuration or the input has mistakes; exit code 2."""

    exit_code = 2


class Unreachable(Failure):
    """The agent, the runtime or the machine's files cannot be reached; exit code 3."""

    exit_code = 3


@contextmanager
def friendly() -> Iterator[None]:
    """Turn our exceptions into messages and exit codes."""
    try:
        yield
    except ConfigError as error:
        raise Mistake(describe(error)) from error
    except AgentError as error:
        from nri_numa.errors import RuntimeUnavailable, TopologyError

        kind = Unreachable if isinstance(error, RuntimeUnavailable | TopologyError) else Failure
        raise kind(harmless(str(error))) from error


def serve(given: str | None, flags: dict[str, object], run: Callable[[AgentConfig], int]) -> int:
    """Load the configuration and run a process that serves; the result is the exit code.

    Args:
        given: path of the configuration, where the command line has one.
        flags: settings of the command line by their names; None for what it does not say.
        run: works until it is told to stop.
    """
    from nri_numa import config as configuration
    from nri_numa.observe import logs

    with friendly():
        config = configuration.load(config_path(given), dict(os.environ), flags)
        try:
            logs.setup(config.log.level, config.log.format, file=config.log.file)
        except OSError as error:
            raise Mistake(f"log.file: {error.filename}: {error.strerror or error}") from error
        try:
            return run(config)
        finally:
            logs.flush()


def log_options(function: Function) -> Function:
    """``--log-level`` and ``--log-format``."""
    level = click.option(
        "--log-level",
        type=click.Choice(["debug", "info", "warning", "error"]),
        help="Least severe line that is written.",
    )
    form = click.option(
        "--log-format", type=click.Choice(["logfmt", "json"]), help="How lines are written."
    )
    return level(form(function))


def describe(error: ConfigError) -> str:
    """All problems of a configuration, one on each line."""
    count = len(error.problems)
    head = f"{error.source}: {count} mistake{'s' if count != 1 else ''} in the configuration"
    return "\n".join([head, *(f"  {harmless(problem)}" for problem in error.problems)])


def config_option(function: Function) -> Function:
    """``--config FILE``."""
    return click.option(
        "--config",
        "config_path",
        metavar="FILE",
        type=click.Path(dir_okay=False),
        envvar="NRI_NUMA_CONFIG",
        help=f"Configuration file.  [default: {DEFAULT_CONFIG}, where it exists]",
    )(function)


def output_option(*forms: str) -> Callable[[Function], Function]:
    """``-o table|json|yaml``."""
    forms = forms or ("table", "json", "yaml")
    return click.option(
        "-o",
        "--output",
        type=click.Choice(forms),
        default=forms[0],
        show_default=True,
        help="How the answer is written.",
    )


def named(ctx: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """Refuse an empty name: it is a variable that was not set, and not the live machine.

    Raises:
        click.BadParameter: it is empty.
    """
    if value == "":
        raise click.BadParameter("is empty; expected the name of a folder or file")
    return value


def sysfs_option(function: Function) -> Function:
    """``--sysfs-root DIR``."""
    return click.option(
        "--sysfs-root",
        metavar="DIR",
        type=click.Path(),
        callback=named,
        help="Directory that holds a sys/ tree, or an archive of one.  [default: /]",
    )(function)


def config_path(given: str | None) -> str | None:
    """The file to read: the given one, or the default one where it exists."""
    if given:
        return given
    return DEFAULT_CONFIG if os.path.exists(DEFAULT_CONFIG) else None


def emit(document: object, output: str) -> None:
    """Write a document as JSON or YAML.

    Letters of all scripts are written as they are, unless there is something among them that a
    terminal would act upon.
    """
    text = _serialize(document, output, plain=False)
    encoding = getattr(sys.stdout, "encoding", None) or "ascii"
    if not encoding.lower().startswith("utf") or not text.replace("\n", "").isprintable():
        text = _serialize(document, output, plain=True)
    click.echo(text, nl=False)


def one_line(document: object) -> str:
    """A document as JSON in one line of ASCII: nothing in it ends a line or moves a cursor."""
    import json

    return json.dumps(document)


def _serialize(document: object, output: str, *, plain: bool) -> str:
    if output == "json":
        import json

        return json.dumps(document, indent=2, ensure_ascii=plain) + "\n"
    import yaml

    return str(yaml.safe_dump(document, sort_keys=False, allow_unicode=not plain))


def terminal_width() -> int:
    """Columns to wrap sentences at: ``COLUMNS``, else the terminal's, 80 where there is none."""
    if sys.stdout.isatty():
        import shutil  # with it come four compressors, which an agent never needs

        return shutil.get_terminal_size((WIDTH, 24)).columns
    return _given_columns() or WIDTH


def table_width() -> int | None:
    """Columns that a table may take; None for as many as it needs.

    What reads a pipe looks for whole words: nothing is narrowed for it, unless it says by
    ``COLUMNS`` how wide it is, as ``watch`` does.
    """
    return terminal_width() if sys.stdout.isatty() else _given_columns()


def _given_columns() -> int | None:
    text = os.environ.get("COLUMNS", "")
    fine = text.isascii() and text.isdigit() and len(text) < 7
    return int(text) or None if fine else None


def cell_width(text: str) -> int:
    """Columns that a text takes in a terminal."""
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1
        for c in text
    )


def clip(text: str, width: int) -> str:
    """``text`` in at most ``width`` columns; the middle goes, since both ends tell names apart."""
    if cell_width(text) <= width:
        return text
    if width < 4:
        return "…"[:width]
    head, tail = (width - 1 + 1) // 2, (width - 1) // 2
    while cell_width(text[:head]) > (width - 1 + 1) // 2:
        head -= 1
    while tail and cell_width(text[-tail:]) > (width - 1) // 2:
        tail -= 1
    return f"{text[:head]}…{text[len(text) - tail :]}"


def table(
    head: Sequence[str], rows: Iterable[Sequence[object]], *, width: int | None = None
) -> list[str]:
    """Lines of a table: on a terminal the widest columns give way, in a pipe none does.

    Args:
        head: titles.
        rows: cells.
        width: columns that it must fit, whatever standard output is.
    """
    limit = width or (terminal_width() if sys.stdout.isatty() else sys.maxsize)
    cells = [list(head), *([harmless(str(cell)) for cell in row] for row in rows)]
    widths = [max(cell_width(row[i]) for row in cells) for i in range(len(head))]
    room = limit - 2 * (len(head) - 1)
    while sum(widths) > room and max(widths) > 4:
        # Of equally wide columns the last gives way: the first ones name the thing.
        widest = max(range(len(widths)), key=lambda i: (widths[i], i))
        widths[widest] -= 1
    lines = []
    for row in cells:
        parts = []
        for text, cell in zip(row, widths, strict=True):
            shown = clip(text, cell)
            parts.append(shown + " " * (cell - cell_width(shown)))
        lines.append("  ".join(parts).rstrip())
    return lines


def human_duration(seconds: float) -> str:
    """``42s``, ``7m``, ``3h12m``, ``9d4h``."""
    total = int(seconds)
    if total < 60:
        return f"{max(0, total)}s"
    minutes = total // 60
    if minutes < 60:
        return f"{minutes}m"
    hours, minutes = divmod(minutes, 60)
    if hours < 24:
        return f"{hours}h{minutes}m" if minutes else f"{hours}h"
    days, hours = divmod(hours, 24)
    return f"{days}d{hours}h" if hours else f"{days}d"


def human_size(amount: int) -> str:
    """``512Mi``, ``62.6Gi``."""
    value = float(amount)
    for unit in ("", "Ki", "Mi", "Gi", "Ti"):
        if abs(value) < 1024:
            return (
                f"{value:.0f}{unit}"
                if value >= 100 or value == int(value)
                else f"{value:.1f}{unit}"
            )
        value /= 1024
    return f"{value:.1f}Pi"


# --- ``nri-numa completion``: what a shell needs to complete our commands -------------------------


_EXAMPLES = """\b
  nri-numa completion bash > /etc/bash_completion.d/nri-numa
  nri-numa completion zsh > "${fpath[1]}/_nri-numa"
  nri-numa completion fish > ~/.config/fish/completions/nri-numa.fish"""


@click.command(epilog=_EXAMPLES)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print the completion script of SHELL."""
    kind = get_completion_class(shell)
    assert kind is not None  # noqa: S101  # the choices are click's own
    root = ctx.find_root().command
    click.echo(kind(root, {}, "nri-numa", "_NRI_NUMA_COMPLETE").source())


# --- Says on a terminal what a command is at, when that takes longer than a moment ----------------


MOMENT: Final = 1.0
"""Seconds in which nothing is said."""
_ERASE: Final = "\r\x1b[K"


@contextmanager
def progress(doing: str, *, after: float = MOMENT) -> Iterator[Callable[[str], None]]:
    """Show ``doing`` and the seconds since, while the block runs; nothing of it stays.

    It goes to standard error, and only where that is a terminal, so that neither pipes nor logs get
    it. The block must write nothing itself.

    Args:
        doing: what takes the time, such as ``asking 127.0.0.1:9891``.
        after: seconds that the block may take unannounced.

    Yields:
        What says that it is at something else now.
    """
    now = [doing]

    def at(other: str) -> None:
        now[0] = other

    if not sys.stderr.isatty():
        yield at
        return
    started, done = time.monotonic(), threading.Event()

    def tell() -> None:
        told = False
        while not done.wait(after):
            told = True
            seconds = time.monotonic() - started
            text = clip(harmless(f"{now[0]} … {seconds:.0f} s"), max(1, terminal_width() - 1))
            sys.stderr.write(f"{_ERASE}{text}")
            sys.stderr.flush()
        if told:
            sys.stderr.write(_ERASE)
            sys.stderr.flush()

    teller = threading.Thread(target=tell, daemon=True)
    teller.start()
    try:
        yield at
    finally:
        done.set()
        teller.join()


# --- Completion of pods, namespaces and containers with what the live agent tells -----------------
# A shell waits for it with the cursor standing still: whatever is wrong, the answer is there after
# `LIMIT` seconds, and it is empty.


LIMIT: Final = 2.0
"""Seconds that a shell waits at most."""
_FINE: Final = re.compile(r"[a-z0-9][a-z0-9._-]{0,252}", re.ASCII)
"""Names as Kubernetes allows them; others are not put into a command line."""


class Known(NamedTuple):
    """One container that runs here or was refused lately."""

    namespace: str
    pod: str
    container: str


def known(ctx: click.Context) -> list[Known]:
    """The containers that the agent knows, in the order of their names; empty without an agent."""
    found: list[Known] = []

    def ask() -> None:
        found.extend(_ask(ctx))

    # A thread that is left behind: a name that is resolved, or an answer that comes byte by byte,
    # keeps to no time limit of a socket.
    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(LIMIT)
    return [] if asking.is_alive() else found


def _ask(ctx: click.Context) -> Iterator[Known]:
    from nri_numa.cli.agent_client import client

    given = [ctx.params.get(name) for name in ("api", "token_file", "ca_file")]
    try:
        asked = client(*given, timeout=LIMIT)
        listed: list[dict[str, Any]] = [
            *asked.get("/v1/assignments")["containers"],
            *asked.get("/v1/refusals")["refusals"],
        ]
        names = {(one["namespace"], one["pod"], one["container"]) for one in listed}
    except Exception:  # whatever it is, a shell shows nothing of it
        return
    for each in sorted(names):
        if all(isinstance(part, str) and _FINE.fullmatch(part) for part in each):
            yield Known(*each)


def _completion(
    choose: Callable[[click.Context, list[Known], str], Iterable[str]],
) -> Callable[[click.Context, click.Parameter, str], list[str]]:
    """A function as click wants it of one that chooses among all names."""

    def complete(ctx: click.Context, _parameter: click.Parameter, begun: str) -> list[str]:
        found = dict.fromkeys(choose(ctx, known(ctx), begun))
        return [name for name in found if name.startswith(begun)]

    return complete


def _namespace(ctx: click.Context) -> str | None:
    return ctx.params.get("namespace")


@_completion
def namespaces(_ctx: click.Context, found: list[Known], _begun: str) -> Iterable[str]:
    """Of all namespaces with containers here."""
    return (one.namespace for one in found)


@_completion
def pods(ctx: click.Context, found: list[Known], _begun: str) -> Iterable[str]:
    """Of pods by their name alone, of the namespace that is given."""
    within = _namespace(ctx)
    return (one.pod for one in found if within in (None, one.namespace))


@_completion
def pods_of_namespaces(ctx: click.Context, found: list[Known], begun: str) -> Iterable[str]:
    """Of pods as ``explain`` takes them: NAMESPACE/POD, or POD behind ``-n`` or once begun."""
    within = _namespace(ctx)
    if within is None:
        yield from (f"{one.namespace}/{one.pod}" for one in found)
    if within is not None or begun:
        yield from (one.pod for one in found if within in (None, one.namespace))


@_completion
def containers(ctx: click.Context, found: list[Known], _begun: str) -> Iterable[str]:
    """Of the containers of the pod that stands before it."""
    namespace, slash, pod = str(ctx.params.get("pod") or "").partition("/")
    within = namespace if slash else _namespace(ctx)
    for one in found:
        if one.pod == (pod if slash else namespace) and within in (None, one.namespace):
            yield one.container
