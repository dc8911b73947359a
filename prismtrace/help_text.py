"""How commands explain themselves: plain text that wraps, values with names, whole examples."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup
from typer.models import ArgumentInfo

__all__ = ["COMMANDS_OF", "App", "Command", "CommandList"]


@contextmanager
def _plain_words() -> Iterator[None]:
    """Complaints about values without the words that Pydantic puts before them."""
    try:
        yield
    except typer.BadParameter as error:
        error.message = error.message.removeprefix("Value error, ")
        raise


class Command(TyperCommand):
    """A command whose help and complaints speak of its arguments, not of Python's types."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse as Typer does, in plain words."""
        with _plain_words():
            return super().parse_args(ctx, args)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """`TRACE...` where Typer writes `{TRACE...}...`."""
        pieces = super().collect_usage_pieces(ctx)
        return [re.sub(r"^\{(.*?)(?:\.\.\.)?\}", r"\1", piece) for piece in pieces]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments and options, without types behind the names of arguments."""
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is None:
                continue
            name, text = record
            if parameter.param_type_name == "argument":
                sections["Arguments"].append((name.partition(" ")[0], text))
            else:
                sections["Options"].append((name, text))
        for title, records in sections.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


# The other packages may be absent, and loading them takes time: only their names are known.
COMMANDS_OF = {
    "prismtrace": "convert info validate schema export hang diff query slice-out concat",
    "prismcalib": "critical-path predict check merge comm-table coarsen what-if compare health "
    "stragglers waits report",
    "prismreplay": "collect record emulate slice plan run comm-bench doctor",
}
"""Which program has which commands."""


class CommandList(TyperGroup):
    """A list of commands whose summaries are wrapped, not cut."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse as Typer does, in plain words."""
        with _plain_words():
            return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find a command; say whose it is if another program has it."""
        for program, names in COMMANDS_OF.items():
            if args and args[0] in names.split() and self.get_command(ctx, args[0]) is None:
                ctx.fail(f"No such command {args[0]!r}: it is {program} {args[0]}.")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the name of every command and the first paragraph of its help."""
        summaries = [
            (name, " ".join((command.help or "").partition("\n\n")[0].split()))
            for name in self.list_commands(ctx)
            if (command := self.get_command(ctx, name)) is not None and not command.hidden
        ]
        with formatter.section("Commands"):
            formatter.write_dl(summaries)


class App(typer.Typer):
    """An application whose help keeps examples on one line, to be copied."""

    def command(self, name: str | None = None, **settings: Any) -> Any:
        """As `typer.Typer.command`."""
        settings = {"cls": Command, **settings}

        def register(function: Any) -> Any:
            text = inspect.getdoc(function) or ""
            # Click leaves the lines of a paragraph alone that begins with this character.
            kept = re.sub(r"^(?=Example: )", "\b\n", text, flags=re.MULTILINE)
            _name_values(function)
            return typer.Typer.command(self, name, **{"help": kept, **settings})(function)

        return register


_VALUE_NAMES = {Path: "FILE", int: "N", float: "NUMBER", str: "TEXT"}


def _name_values(function: Any) -> None:
    """Give every argument and option of a command a name for its value, unless it has one."""
    # Evaluated here and kept: Typer would make descriptions of its own from the text.
    function.__annotations__ = get_type_hints(function, include_extras=True)
    for name, annotation in function.__annotations__.items():
        if get_origin(annotation) is not Annotated:
            continue
        kind, described = get_args(annotation)[:2]
        if described.metavar is not None:
            continue
        if isinstance(described, ArgumentInfo):
            described.metavar = name.upper() + ("..." if get_origin(kind) is list else "")
            continue
        if get_origin(kind) is UnionType:
            kind = get_args(kind)[0]
        if get_origin(kind) is list:
            kind = get_args(kind)[0]
        if issubclass(kind, StrEnum):
            described.metavar = "|".join(kind)
        else:
            described.metavar = _VALUE_NAMES.get(kind)
