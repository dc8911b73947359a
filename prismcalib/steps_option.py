"""The option --steps of the commands that analyse a run, and how they say what it left out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from prismcalib.chosen_steps import ChosenSteps

__all__ = ["StepsOption", "print_steps"]


def _checked(text: str) -> str:
    from prismcalib.chosen_steps import parse_steps

    try:
        parse_steps(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    return text


StepsOption = Annotated[
    str,
    typer.Option(
        "--steps",
        metavar="STEPS",
        callback=_checked,
        help="Steps to look at. auto: without the job's start and first step, if the trace was "
        "recorded from there. all: everything. 1-4, or 4: these.",
    ),
]


def print_steps(looked_at: ChosenSteps | None, *, of: str = "") -> None:
    """A line about what was left out (`of` which trace); nothing if nothing was."""
    if looked_at is not None and looked_at.sentence:
        print(f"{f'{of}: ' if of else ''}{looked_at.sentence}\n")
