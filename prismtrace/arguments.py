"""Arguments that several commands of `prismtrace` take, and what becomes of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from prismtrace.trace import Trace

__all__ = [
    "JsonFlag",
    "TraceArgument",
    "chosen_numbers",
    "chosen_ranks",
    "numbers_of",
    "ranks_of_files",
    "wrong_usage",
]

TraceArgument = Annotated[
    list[str],
    typer.Argument(
        metavar="TRACE...",
        help="Trace file, folder of files, or pattern in quotes.",
        show_default=False,
    ),
]
JsonFlag = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]


def chosen_ranks(text: str, trace: Trace) -> tuple[int, ...]:
    """The ranks that `--ranks` names; wrong usage if it names none.

    Raises:
        RankError: the trace does not have one of them.
    """
    from prismtrace.headers import require_ranks

    chosen = chosen_numbers(text, "--ranks", "rank")
    require_ranks(trace.header, chosen, ", ".join(map(str, trace.paths)) or None)
    return chosen


def chosen_numbers(text: str, flag: str, what: str) -> tuple[int, ...]:
    """Numbers as in `0-7` or `0,8,16`; wrong usage if there is none."""
    from prismtrace.ranks import MOST_RANKS, parse_numbers

    try:
        chosen = parse_numbers(text, what, MOST_RANKS if what == "rank" else 2**31)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=flag) from error
    if not chosen:
        raise typer.BadParameter(f"names no {what}", param_hint=flag)
    return chosen


@contextmanager
def wrong_usage(flag: str) -> Iterator[None]:
    """What is wrong about an option's value is told like every wrong usage.

    A file that cannot be read or written is no wrong usage.
    """
    from prismtrace.errors import InputFileError, OutputError, TraceError

    try:
        yield
    except (InputFileError, OutputError):
        raise
    except TraceError as error:
        hint = f"; {error.hint}" if error.hint else ""
        raise typer.BadParameter(error.message + hint, param_hint=flag) from error


_MOST_DIGITS = 18  # Python refuses to read thousands of them


def ranks_of_files(given: list[str], files: list[str]) -> dict[str, int]:
    """`FILE=N` texts as a mapping; a lone number belongs to a single input."""
    whole = [
        f"{files[0]}={text}" if "=" not in text and len(files) == 1 else text for text in given
    ]
    for text in whole:
        if "=" not in text and text.isdecimal():
            raise typer.BadParameter(
                f"several inputs: say which one has rank {text}, as FILE={text}",
                param_hint="--rank",
            )
    return numbers_of(whole, "FILE=N", "--rank")


def numbers_of(given: list[str], form: str, flag: str) -> dict[str, int]:
    """`NAME=N` texts as a mapping."""
    numbers: dict[str, int] = {}
    for text in given:
        name, _, number = text.rpartition("=")
        if not name or not number.isdecimal() or len(number) > _MOST_DIGITS:
            raise typer.BadParameter(f"{text!r} is not {form}", param_hint=flag)
        numbers[name] = int(number)
    return numbers
