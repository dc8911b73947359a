"""What all three commands share at the terminal: errors, tables, JSON, progress.

Results go to stdout; errors, hints and progress go to stderr.

    app = new_app("What the command is for.")

    @app.command()
    def info(path: Path) -> None:
        with progress("reading", total=path.stat().st_size, unit="bytes") as bar:
            ...
            bar.advance(n)
        print_json(summary)

    def main() -> NoReturn:
        exit_codes.run(app)

Nothing here imports Rich, Polars or Pydantic before it is needed, so that `--help` is quick.
"""

from __future__ import annotations

import contextlib
import dataclasses
import numbers
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from prismtrace.completion import Shell, print_completion
from prismtrace.errors import PrismError
from prismtrace.help_text import App, CommandList
from prismtrace.progress_bar import Progress, progress

__all__ = [
    "Progress",
    "announce_output",
    "counted",
    "new_app",
    "print_error",
    "print_failure",
    "print_json",
    "printable",
    "progress",
    "row_or_table",
    "table",
    "warn_of_suffix",
]


def new_app(help: str) -> typer.Typer:
    """A typer application with the settings and flags (`--version`, `--show-completion`) all share.

    Help is plain text: a table of Rich squeezes explanations into a narrow column and cuts
    examples.
    """
    app = App(
        cls=CommandList,
        help=help,
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    )

    @app.callback()
    def root(
        version: Annotated[
            bool,
            typer.Option(
                "--version", callback=_print_version, is_eager=True, help="Print the version."
            ),
        ] = False,
        show_completion: Annotated[
            Shell | None,
            typer.Option(
                callback=print_completion,
                is_eager=True,
                metavar="|".join(Shell),
                help="Print a script; the shell that runs it completes commands and flags.",
            ),
        ] = None,
    ) -> None:
        pass

    # typer takes the application's help from the callback's docstring when it has one.
    root.__doc__ = None
    return app


def _print_version(wanted: bool) -> None:
    if not wanted:
        return
    from prismtrace import __version__

    print(f"prismllm-toolkit {__version__}")
    raise typer.Exit


def print_error(error: PrismError) -> None:
    """Write `error: message [where]` and, indented, its hint to stderr."""
    print_failure(error.message, where=error.where, hint=error.hint)


def print_failure(message: str, *, where: object = None, hint: str | None = None) -> None:
    """As `print_error`, for what is no error of ours."""
    place = "" if where is None else f" [{_text(where)}]"
    lines = [f"error: {printable(message)}{place}"]
    if hint is not None:
        lines.append(f"  hint: {printable(hint)}")
    # A terminal that is gone is no reason for a second failure.
    with contextlib.suppress(OSError, ValueError):
        print("\n".join(lines), file=sys.stderr, flush=True)


def counted(number: int, noun: str) -> str:
    """`1 group`, `2 groups`, `1,000 copies`."""
    plural = f"{noun[:-1]}ies" if noun.endswith("y") else f"{noun}s"
    return f"{number:,} {noun if number == 1 else plural}"


def announce_output(path: str | os.PathLike[str]) -> None:
    """The last line of a command that wrote a file, or a folder: where it is and how large."""
    target = Path(path)
    files = list(target.iterdir()) if target.is_dir() else [target]
    size = float(sum(file.stat().st_size for file in files))
    unit = "bytes"
    for larger in ("kB", "MB", "GB"):
        if size < 1000:
            break
        size, unit = size / 1000, larger
    digits = 0 if unit == "bytes" else 1
    number = f"{counted(len(files), 'file')}, " if target.is_dir() else ""
    print(f"wrote {printable(os.fspath(path))} ({number}{size:,.{digits}f} {unit})")


def warn_of_suffix(path: str | os.PathLike[str]) -> None:
    """Say on stderr that folders will not show a file that is named otherwise."""
    if not os.fspath(path).endswith(".parquet"):
        print(
            f"warning: {printable(os.fspath(path))} does not end in .parquet: it can be opened "
            "by name, but not as part of a folder",
            file=sys.stderr,
        )


def print_json(obj: object) -> None:
    """Print `obj` to stdout as one indented JSON document.

    Takes Pydantic models, dataclasses, mappings, sequences and NumPy scalars, nested at
    will. Not-a-number and infinities are not JSON and raise ValueError.
    """
    import json

    ascii_only = (sys.stdout.encoding or "").lower().replace("-", "") != "utf8"
    print(json.dumps(obj, default=_jsonable, indent=2, ensure_ascii=ascii_only, allow_nan=False))


def _jsonable(obj: Any) -> Any:
    if hasattr(obj, "model_dump"):
        return obj.model_dump(mode="json")
    if dataclasses.is_dataclass(obj) and not isinstance(obj, type):
        # Field by field, not `asdict`: nested models must come back here as they are.
        return {field.name: getattr(obj, field.name) for field in dataclasses.fields(obj)}
    if isinstance(obj, Mapping):
        return dict(obj)
    if isinstance(obj, (set, frozenset)):
        return sorted(obj)
    if isinstance(obj, (Sequence, Iterator)):
        return list(obj)
    if isinstance(obj, os.PathLike):
        return os.fspath(obj)
    if hasattr(obj, "tolist"):  # NumPy scalars and arrays
        return obj.tolist()
    raise TypeError(f"{type(obj).__name__} cannot be written as JSON")


def table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[object]], *, of: int = 0
) -> None:
    """Print a table to stdout; columns that hold only numbers are right-aligned.

    Where there are more rows (`of`) than a command's --limit let through, the last line says so.

    `None` becomes `-`. On a terminal Rich draws it and folds long cells to the width; into
    a file or pipe it is plain text with two spaces between columns and nothing cut.
    """
    raw = [list(row) for row in rows]
    right = [
        bool(raw) and all(row[i] is None or isinstance(row[i], numbers.Real) for row in raw)
        for i in range(len(columns))
    ]
    cells = [[_text(value) for value in row] for row in raw]
    columns = [printable(column) for column in columns]
    if sys.stdout.isatty():
        _print_rich_table(title, columns, cells, right)
    else:
        _print_plain_table(title, columns, cells, right)
    if of > len(raw):
        print(f"... and {of - len(raw)} more (--limit)")


def row_or_table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table; a single row that is wider than the screen is printed one column a line.

    Long values go on below. A pipe counts as 100 characters wide, unless COLUMNS says more.
    """
    kept, columns = list(rows), [printable(column) for column in columns]
    cells = [_text(value) for value in kept[0]] if len(kept) == 1 else []
    width = shutil.get_terminal_size((_PIPE_WIDTH, 0)).columns
    if sum(map(max, map(len, columns), map(len, cells))) + 2 * len(cells) <= width:
        table("", columns, kept)
        return
    indent = max(map(len, columns)) + 2
    for column, cell in zip(columns, cells, strict=True):
        lines = textwrap.wrap(cell, max(width - indent, _LEAST_WIDTH), break_on_hyphens=False)
        print(column.ljust(indent) + f"\n{' ' * indent}".join(lines or [""]))


_PIPE_WIDTH = 100
_LEAST_WIDTH = 20


def _text(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, bytes):
        value = os.fsdecode(value)
    return f"{value:,.2f}" if isinstance(value, float) else printable(str(value))


_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """`text` on one line, with escapes for what a terminal would obey or cannot show.

    Names come from the traces: whoever made them may have put control sequences there.
    """
    return _UNPRINTABLE.sub(lambda match: ascii(match.group())[1:-1], text)


def _print_plain_table(
    title: str, columns: Sequence[str], cells: list[list[str]], right: list[bool]
) -> None:
    widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]
    if title:
        print(title)
    for row in [list(columns), ["-" * width for width in widths], *cells]:
        padded = [
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(row, widths, right, strict=True)
        ]
        print("  ".join(padded).rstrip())


def _print_rich_table(
    title: str, columns: Sequence[str], cells: list[list[str]], right: list[bool]
) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    drawn = Table(title=Text(title) if title else None, title_justify="left")
    for column, to_right in zip(columns, right, strict=True):
        drawn.add_column(Text(column), justify="right" if to_right else "left", overflow="fold")
    for row in cells:
        # Text, not str: kernel names contain brackets that Rich would read as markup.
        drawn.add_row(*(Text(cell) for cell in row))
    Console().print(drawn)
