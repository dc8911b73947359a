"""The command `prismreplay`."""

from __future__ import annotations

from typing import Annotated, NoReturn

import typer

from prismreplay.commands_collect import collect
from prismreplay.commands_comm_bench import comm_bench
from prismreplay.commands_emulate import emulate
from prismreplay.commands_plan import plan
from prismreplay.commands_record import record
from prismreplay.commands_run import run
from prismreplay.commands_slice import slice_
from prismtrace import console, exit_codes

__all__ = ["app", "main"]

app = console.new_app(
    "Run a few ranks of a large job for real among virtual ones. "
    "`emulate` does all of it, the other commands one step each."
)

# What comes after the program's name is the program's own, also without two dashes.
app.command(context_settings={"allow_interspersed_args": False})(collect)
app.command(context_settings={"allow_interspersed_args": False})(record)
app.command(context_settings={"allow_interspersed_args": False})(emulate)
app.command("slice")(slice_)
app.command()(plan)
app.command()(run)
app.command("comm-bench")(comm_bench)


@app.command()
def doctor(
    json: Annotated[bool, typer.Option("--json", help="Print the checks as JSON.")] = False,
) -> None:
    """Say what this machine can do, what is missing and how to get it.

    Exits with 1 when something is missing that running ranks on CPUs needs; a missing GPU is
    reported and is no failure.
    """
    from prismreplay.doctor import examine

    report = examine()
    if json:
        console.print_json(report.as_dict())
    else:
        console.table(
            "What this machine can do",
            ["check", "status", "found", "needed for", "what to do"],
            [
                [check.name, check.status, check.found, check.needed_for, check.hint or ""]
                for check in report.checks
            ],
        )
        print()
        print(report.verdict())
    if not report.ok:
        raise typer.Exit(1)


def main() -> NoReturn:
    """Entry point of the console script."""
    exit_codes.run(app)


if __name__ == "__main__":
    main()
