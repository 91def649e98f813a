"""The reference of docs/cli.md, from the commands themselves.

``python -m tools.docs_cli`` writes it.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

import click

from nri_numa.cli import COMMANDS, EXIT_CODES_HELP_TEXT, cli
from tools.docs_regions import cell, code, table, write

MIN_COMMANDS = 3
"""Commands from which on an option of one name and meaning is a common one."""


def text() -> str:
    """Exit codes, common options, and for each command usage, what it does and its own options."""
    rows = [line.split(maxsplit=1) for line in EXIT_CODES_HELP_TEXT.splitlines()[2:]]
    lines = ["## Exit codes", "", *table(("code", "meaning"), rows), ""]
    with click.Context(cli, info_name="nri-numa", **cli.context_settings) as root:
        commands = {name: cli.get_command(root, name) for name in COMMANDS}
        options = {name: _options(command, root) for name, command in commands.items() if command}
        names_by_row: dict[tuple[str, str], list[str]] = {}
        for name, command_rows in options.items():
            for row in command_rows:
                names_by_row.setdefault(row, []).append(name)
        common = {row: names for row, names in names_by_row.items() if len(names) >= MIN_COMMANDS}
        lines += ["## Common options", ""]
        lines += table(
            ("option", "meaning", "of"),
            [
                (*row, "all" if len(names) == len(options) else ", ".join(map(code, names)))
                for row, names in common.items()
            ],
        )
        for name, command in commands.items():
            assert command is not None, name  # noqa: S101  # a name of the table
            own_rows = [row for row in options[name] if row not in common]
            lines += ["", f"## {name}", "", *_command(command, name, root, own_rows)]
    return "\n".join(lines)


def _options(command: click.Command, root: click.Context) -> list[tuple[str, str]]:
    with click.Context(command, info_name=command.name, parent=root) as context:
        return [
            (code(", ".join(_names(one, context)) + _value(one)), _meaning(one))
            for one in command.get_params(context)
            if isinstance(one, click.Option) and not one.hidden
        ]


def _command(
    command: click.Command, name: str, root: click.Context, rows: list[tuple[str, str]]
) -> Iterator[str]:
    with click.Context(command, info_name=name, parent=root) as context:
        usage = " ".join(command.collect_usage_pieces(context))
        yield from ("```text", f"nri-numa {name} {usage}".rstrip(), "```", "")
        yield from _paragraphs(command.help or "")
        if rows:
            yield from table(("option", "meaning"), rows)
        if command.epilog:
            epilog = textwrap.dedent(command.epilog.replace("\b\n", ""))
            yield from ("", "```text", *epilog.strip("\n").splitlines(), "```")


def _names(option: click.Option, context: click.Context) -> list[str]:
    if option is context.command.get_help_option(context):
        # The command keeps the option it made first, with the names that were right for that call.
        return list(context.help_option_names)
    return [*option.opts, *option.secondary_opts]


def _paragraphs(help_text: str) -> Iterator[str]:
    for paragraph in textwrap.dedent(help_text).strip().split("\n\n"):
        yield " ".join(paragraph.split()).replace("<", "&lt;")
        yield ""


def _value(option: click.Option) -> str:
    if option.is_flag or option.count:
        return ""
    if isinstance(option.type, click.Choice):
        return " " + "|".join(str(choice) for choice in option.type.choices)
    return f" {option.metavar or option.type.name.upper()}"


def _meaning(option: click.Option) -> str:
    meaning = cell(" ".join((option.help or "").split()))
    if option.show_default and option.default is not None and not option.is_flag:
        meaning += f" [default: {option.default}]"
    if isinstance(option.envvar, str):
        meaning += f" {code(option.envvar)}"
    return meaning.strip()


if __name__ == "__main__":
    write("cli.md", "tools.docs_cli", text())
