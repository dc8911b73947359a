"""Completion of commands, flags and values by the shell that the person types into."""

from __future__ import annotations

import os
from enum import StrEnum
from importlib import import_module
from typing import Any

import typer

__all__ = ["Shell", "answer_completion", "print_completion"]


class Shell(StrEnum):
    """Shells for which there is a script."""

    bash = "bash"
    zsh = "zsh"
    fish = "fish"


def print_completion(ctx: typer.Context, wanted: Shell | None) -> None:
    """Print the script that makes a shell ask the program for completions, and leave.

    Nothing is installed: where start-up files lie, and whether they may be changed, is the
    person's business. The program's name is that by which it was called.
    """
    if wanted is None or ctx.resilient_parsing:
        return
    program = ctx.find_root().info_name or ""
    print(
        _typer().get_completion_script(
            prog_name=program, complete_var=_variable(program), shell=wanted
        )
    )
    raise typer.Exit


def answer_completion(program: str) -> None:
    """Let Typer answer if it is the script of a shell that calls; costs nothing otherwise."""
    if _variable(program) in os.environ:
        _typer().completion_init()


def _typer() -> Any:
    """Typer's module of scripts and answers, which takes a while to load."""
    return import_module("typer.completion")


def _variable(program: str) -> str:
    """The environment variable in which the scripts say what they ask for."""
    return f"_{program}_COMPLETE".replace("-", "_").upper()
