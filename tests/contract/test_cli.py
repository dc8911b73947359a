"""Commands and flags are a promise: a change shows here first.

`make docs` writes cli.txt and docs/reference/cli.md anew; the difference belongs in the
changelog.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner

from prismtrace import help_text

INTRODUCTION = """\
Generated from the commands themselves by `make docs`. Every command also explains itself with
`--help`. Exit codes: 0 good, 1 the input or the run is bad, 2 wrong usage, 130 interrupted.
Results go to stdout, errors and progress to stderr. `eval "$(prismtrace --show-completion bash)"`
in `~/.bashrc` (or zsh's, or fish's file), once for each program, lets the shell complete commands
and flags.
"""

COMMANDS = ("prismtrace", "prismcalib", "prismreplay")


def _walk(name: str, command: Any) -> Iterator[tuple[str, Any]]:
    yield name, command
    for child, sub in sorted(getattr(command, "commands", {}).items()):
        yield from _walk(f"{name} {child}", sub)


def _all_commands() -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for name in COMMANDS:
        app = importlib.import_module(f"{name}.cli").app
        found.extend(_walk(name, typer.main.get_command(app)))
    return found


def test_commands_of_other_programs_are_known_by_name() -> None:
    for name in COMMANDS:
        app = importlib.import_module(f"{name}.cli").app
        known = set(help_text.COMMANDS_OF[name].split())
        assert known == set(typer.main.get_command(app).commands), name
    done = CliRunner().invoke(importlib.import_module("prismtrace.cli").app, ["merge", "a"])
    assert (done.exit_code, "it is prismcalib merge" in done.stderr) == (2, True)


def _spelling(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return parameter.name.upper() + ("..." if parameter.nargs == -1 else "")
    flags = ", ".join([*parameter.opts, *parameter.secondary_opts])
    return f"{flags} {parameter.metavar}" if parameter.metavar else flags


def _traits(parameter: Any) -> str:
    traits = []
    if parameter.required:
        traits.append("required")
    if getattr(parameter, "multiple", False):
        traits.append("repeatable")
    return f" ({', '.join(traits)})" if traits else ""


def _frozen() -> str:
    lines = []
    for name, command in _all_commands():
        lines.append(name)
        lines.extend(f"    {_spelling(p)}{_traits(p)}" for p in command.params)
    return "\n".join(lines) + "\n"


def _flow(text: str | None) -> str:
    """Paragraphs kept, line breaks inside them not; `\\b` and form feeds are click's."""
    paragraphs = re.split(r"\n\s*\n", (text or "").replace("\b", "").partition("\f")[0])
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs).strip()


def _reference() -> str:
    parts = [
        "# Commands\n",
        INTRODUCTION,
    ]
    for name, command in _all_commands():
        parts.append(f"{'#' * (1 + len(name.split()))} `{name}`\n")
        parts.append(_flow(command.help) + "\n")
        rows = [
            f"| `{_spelling(p)}`{_traits(p)} | {_flow(p.help).replace('|', chr(92) + '|')} |"
            for p in command.params
        ]
        if rows:
            parts.append("\n".join(["| argument or flag | meaning |", "|---|---|", *rows]) + "\n")
    return "\n".join(parts)


def _check(path: Path, text: str, *, regenerate: bool) -> None:
    if regenerate:
        path.write_text(text, encoding="utf-8")
    assert path.read_text(encoding="utf-8") == text, "run `make docs` and review the difference"


def test_commands_and_flags_are_frozen(regenerate):
    _check(Path(__file__).with_name("cli.txt"), _frozen(), regenerate=regenerate)


def test_reference_page_is_current(repo, regenerate):
    _check(repo / "docs/reference/cli.md", _reference(), regenerate=regenerate)


def test_every_command_and_flag_has_help():
    silent = [name for name, command in _all_commands() if not command.help]
    silent += [
        f"{name} {_spelling(parameter)}"
        for name, command in _all_commands()
        for parameter in command.params
        if not parameter.help
    ]
    assert silent == []


@pytest.mark.parametrize("name", COMMANDS)
def test_help_speaks_of_values_not_of_types(name, run_command):
    for words, _ in _all_commands():
        if words.startswith(name) and words != name:
            shown = run_command(*words.split(), "--help").stdout
            assert re.findall(r"<(?:bool|int|str|float|path|file|list)[^>]*>|\{\w", shown) == [], (
                words
            )


def test_examples_are_shown_whole(run_command):
    for words, command in _all_commands():
        examples = re.findall(r"^Example: .*", command.help or "", re.MULTILINE)
        if examples:
            shown = run_command(*words.split(), "--help").stdout
            assert all(example in shown for example in examples)


@pytest.mark.parametrize("name", COMMANDS)
def test_exit_codes_of_usage(name, run_command):
    assert run_command(name, "--help").returncode == 0
    assert run_command(name, "--version").stdout.startswith("prismllm-toolkit ")
    wrong = run_command(name, "no-such-command")
    assert (wrong.returncode, wrong.stdout) == (2, "")
