"""Common parts of the commands: options, failures, the configuration, progress."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click
from click.shell_completion import get_completion_class

from nri_numa.cli.output import clip_text, terminal_width
from nri_numa.errors import AgentError, ConfigError, RuntimeUnavailable, TopologyError
from nri_numa.text import escape_unprintable

if TYPE_CHECKING:
    from nri_numa.config import AgentConfig

DEFAULT_CONFIG_PATH: Final = "/etc/nri-numa/agent.yaml"

Function = TypeVar("Function", bound=Callable[..., Any])

# --- Failures -----------------------------------------------------------------------------------


class Failure(click.ClickException):
    """A failure of a command; exit code 1."""

    exit_code = 1

    def show(self, file: Any = None) -> None:
        """Write the message to standard error."""
        click.echo(f"nri-numa: {self.message}", err=True, file=file)


class InputError(Failure):
    """Mistakes in the configuration or the input; exit code 2."""

    exit_code = 2


class Unreachable(Failure):
    """An agent, a runtime or files of the machine that cannot be reached; exit code 3."""

    exit_code = 3


@contextmanager
def translate_errors() -> Iterator[None]:
    """Turn exceptions of nri-numa into messages and exit codes."""
    try:
        yield
    except ConfigError as error:
        raise InputError(config_error_message(error)) from error
    except AgentError as error:
        kind = Unreachable if isinstance(error, RuntimeUnavailable | TopologyError) else Failure
        raise kind(escape_unprintable(str(error))) from error
    except PermissionError as error:
        raise Unreachable(f"{escape_unprintable(str(error.filename))}: {error.strerror}") from error


def problems_text(problems: Iterable[str], subject: str) -> str:
    """Return all problems of a document, one on each line."""
    lines = [f"  {escape_unprintable(problem)}" for problem in problems]
    return "\n".join([f"{len(lines)} mistake{'s' if len(lines) != 1 else ''} in {subject}", *lines])


def config_error_message(error: ConfigError) -> str:
    """Return all problems of a configuration, one on each line."""
    return f"{error.source}: {problems_text(error.problems, 'the configuration')}"


# --- Options ------------------------------------------------------------------------------------


def compose_options(*options: Callable[[Any], Any]) -> Callable[[Function], Function]:
    """Compose options to one decorator, in the order in which ``--help`` lists them."""

    def apply_options(function: Function) -> Function:
        for option in reversed(options):
            function = option(function)
        return function

    return apply_options


def require_nonempty_name(
    ctx: click.Context, parameter: click.Parameter, value: str | None
) -> str | None:
    """Reject an empty name: it comes from an unset variable and does not mean this machine."""
    if value == "":
        raise click.BadParameter("is empty; expected the name of a folder or file")
    return value


_SETTINGS_META_KEY: Final = "nri_numa.settings"


def setting_option(
    key: str, *declarations: str, check: Callable[..., Any] | None = None, **attributes: Any
) -> Callable[[Function], Function]:
    """Build an option that sets a key of the configuration for `load_command_config`."""

    def store_setting(ctx: click.Context, parameter: click.Parameter, value: object) -> None:
        ctx.meta.setdefault(_SETTINGS_META_KEY, {})[key] = (
            check(ctx, parameter, value) if check is not None else value
        )

    return click.option(*declarations, callback=store_setting, expose_value=False, **attributes)


def command_line_settings() -> dict[str, object]:
    """Return the settings of the command line by key; None for those that it does not have."""
    ctx = click.get_current_context(silent=True)  # none in the thread that completes names
    return ctx.meta.get(_SETTINGS_META_KEY, {}) if ctx is not None else {}


config_option = click.option(
    "--config",
    "config_path",
    metavar="FILE",
    type=click.Path(dir_okay=False),
    envvar="NRI_NUMA_CONFIG",
    help=f"Configuration file.  [default: {DEFAULT_CONFIG_PATH}, if it exists]",
)
_SYSFS_CLICK_OPTION_KWARGS: Final[dict[str, Any]] = {
    "metavar": "DIR",
    "type": click.Path(),
    "help": "Directory that holds a sys/ tree, or an archive of one.  [default: /]",
}
machine_option = click.option(
    "--machine",
    metavar="FILE",
    callback=require_nonempty_name,
    help="A captured machine (archive or directory), or synthetic:KEY=VALUE,... (keys: simulate "
    "--help).",
)
sysfs_option = click.option(
    "--sysfs-root", callback=require_nonempty_name, **_SYSFS_CLICK_OPTION_KWARGS
)
sysfs_setting = setting_option(
    "sysfsRoot", "--sysfs-root", check=require_nonempty_name, **_SYSFS_CLICK_OPTION_KWARGS
)
nri_socket_setting = setting_option(
    "runtime.nriSocket", "--nri-socket", metavar="PATH", help="Unix socket of the runtime's NRI."
)
state_dir_setting = setting_option(
    "stateDir", "--state-dir", metavar="DIR", help="Directory of the checkpoint."
)
log_settings = compose_options(
    setting_option(
        "log.level",
        "--log-level",
        type=click.Choice(["debug", "info", "warning", "error"]),
        help="Minimum severity of lines that are written.",
    ),
    setting_option(
        "log.format",
        "--log-format",
        type=click.Choice(["logfmt", "json"]),
        help="Format of log lines.",
    ),
)
api_options = compose_options(
    click.option(
        "--api",
        metavar="ADDRESS",
        envvar="NRI_NUMA_API",
        help="Address of the agent's API: host:port, a URL or unix:///PATH.  [default: "
        "http.address, or http.socket if that is off]",
    ),
    click.option(
        "--token-file",
        metavar="FILE",
        envvar="NRI_NUMA_TOKEN_FILE",
        help="File with the bearer token.  [default: http.tokenFile]",
    ),
    click.option(
        "--ca-file", metavar="FILE", help="File with the certificate authority of an https address."
    ),
)


def old_options(new_option_of: Mapping[str, str]) -> Callable[[Function], Function]:
    """Build hidden flags that are rejected with the option that replaced them."""

    def old_option(old_name: str, new_name: str) -> Callable[[Function], Function]:
        def reject_flag(_ctx: click.Context, _parameter: click.Parameter, is_used: bool) -> None:
            if is_used:
                raise click.UsageError(f"{old_name} is gone, expected {new_name}")

        return click.option(
            old_name, is_flag=True, hidden=True, expose_value=False, callback=reject_flag
        )

    return compose_options(*(old_option(*names) for names in new_option_of.items()))


def output_option(*forms: str) -> Callable[[Function], Function]:
    """Build the option ``-o table|json|yaml``."""
    forms = forms or ("table", "json", "yaml")
    return click.option(
        "-o",
        "--output",
        type=click.Choice(forms),
        default=forms[0],
        show_default=True,
        help="Output format.",
    )


listing_option = output_option("table", "wide", "json", "yaml")


# --- The configuration --------------------------------------------------------------------------


def find_config_path(path: str | None) -> str | None:
    """Return the file to read: ``path``, or the default file if it exists."""
    if path:
        return path
    return DEFAULT_CONFIG_PATH if os.path.exists(DEFAULT_CONFIG_PATH) else None


def load_command_config(path: str | None) -> AgentConfig:
    """Load the configuration from the command line, the environment and a file.

    Raises:
        InputError: it has mistakes.
    """
    from nri_numa import config as configuration

    with translate_errors():
        return configuration.load_config(
            find_config_path(path), os.environ, command_line_settings()
        )


def run_service(config: AgentConfig, run: Callable[[AgentConfig], int]) -> int:
    """Run a server process with its logs; return the exit code."""
    from nri_numa.observe import logs

    try:
        logs.setup_logging(config.log.level, config.log.format, file=config.log.file)
    except OSError as error:
        raise InputError(f"log.file: {error.filename}: {error.strerror or error}") from error
    try:
        with translate_errors():
            return run(config)
    finally:
        logs.flush_lines()


# --- Progress of a slow command on a terminal -----------------------------------------------------


PROGRESS_DELAY_S: Final = 1.0
"""Seconds before the first output."""
_ERASE_LINE: Final = "\r\x1b[K"


@contextmanager
def show_progress(
    doing: str, *, delay_s: float = PROGRESS_DELAY_S
) -> Iterator[Callable[[str], None]]:
    """Show ``doing`` and the elapsed seconds while the block runs, and erase them at its end.

    It is written to standard error, and only if that is a terminal, so neither pipes nor logs get
    it. The block must write nothing itself. It gets a function that replaces ``doing``.
    """
    texts = [doing]
    if not sys.stderr.isatty():
        yield texts.append
        return
    start_time, stop_event = time.monotonic(), threading.Event()

    def write_progress() -> None:
        has_output = False
        while not stop_event.wait(delay_s):
            has_output = True
            seconds = time.monotonic() - start_time
            text = escape_unprintable(f"{texts[-1]} … {seconds:.0f} s")
            text = clip_text(text, max(1, terminal_width() - 1))
            sys.stderr.write(f"{_ERASE_LINE}{text}")
            sys.stderr.flush()
        if has_output:
            sys.stderr.write(_ERASE_LINE)
            sys.stderr.flush()

    thread = threading.Thread(target=write_progress, daemon=True)
    thread.start()
    try:
        yield texts.append
    finally:
        stop_event.set()
        thread.join()


# --- ``nri-numa completion``: completion scripts for shells ---------------------------------------


_COMPLETION_EXAMPLES = """\b
  nri-numa completion bash > /etc/bash_completion.d/nri-numa
  nri-numa completion zsh > "${fpath[1]}/_nri-numa"
  nri-numa completion fish > ~/.config/fish/completions/nri-numa.fish"""


@click.command("completion", epilog=_COMPLETION_EXAMPLES)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def print_completion_script(ctx: click.Context, shell: str) -> None:
    """Print the completion script of SHELL."""
    kind = get_completion_class(shell)
    assert kind is not None  # noqa: S101  # the choices are click's own
    root = ctx.find_root().command
    click.echo(kind(root, {}, "nri-numa", "_NRI_NUMA_COMPLETE").source())
