"""What all three commands share at the terminal: exit codes, errors, tables, JSON, progress.

Results go to stdout; errors, hints and progress go to stderr. Exit codes: 0 good, 1 the
input or the run is bad, 2 wrong usage, 130 interrupted, 143 and 129 told to stop (SIGTERM, SIGHUP).

    app = new_app("What the command is for.")

    @app.command()
    def info(path: Path) -> None:
        with progress("reading", total=path.stat().st_size, unit="bytes") as bar:
            ...
            bar.advance(n)
        print_json(summary)

    def main() -> NoReturn:
        run(app)

Nothing here imports Rich, Polars or Pydantic before it is needed, so that `--help` is quick.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import errno
import io
import numbers
import os
import re
import signal
import stat
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from prismtrace.completion import Shell, answer_completion, print_completion
from prismtrace.errors import PrismError
from prismtrace.help_text import App, CommandList
from prismtrace.progress_bar import Progress, progress
from prismtrace.signals import stop_signals

__all__ = [
    "Progress",
    "announce_output",
    "counted",
    "new_app",
    "print_error",
    "print_json",
    "printable",
    "progress",
    "run",
    "table",
    "warn_of_suffix",
]

# Modules that come only with an extra: a missing one is the installation's fault, and the
# person needs the name of the extra, not a traceback.
_EXTRA_OF_MODULE = {
    "networkx": "calib",
    "numba": "calib",
    "safetensors": "replay",
    "torch": "replay",
    "cuda": "cuda",
    "dask": "dask",
    "distributed": "dask",
}


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

    print(f"prismllm {__version__}")
    raise typer.Exit


def run(app: typer.Typer) -> NoReturn:
    """Run `app` on `sys.argv` and exit; turn every expected failure into one clear message.

    Typer itself exits with 2 on wrong usage and 130 on Ctrl-C. A `PrismError`, an `OSError`
    nobody handled or a missing optional dependency ends with 1 and no traceback. Any other
    exception is a bug of ours and keeps its traceback.
    """
    _open_closed_streams()
    for stream in (sys.stdout, sys.stderr):
        # A character that the terminal's encoding lacks is no reason to fail.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    answer_completion(Path(sys.argv[0]).name)
    with stop_signals() as stopped:
        try:
            code = _exit_code(app)
        except KeyboardInterrupt:
            code = 130
    if stopped:
        code = 128 + stopped[0]
    # Ctrl-C while the interpreter shuts down ends it without a traceback.
    atexit.register(signal.signal, signal.SIGINT, signal.SIG_DFL)
    _flush_stdout()
    sys.exit(code)


def _exit_code(app: typer.Typer) -> int | str | None:
    """Run `app`; what it ends with, after telling what went wrong."""
    code: int | str | None = 0
    try:
        try:
            _require_threads()
            app()
        except SystemExit as exit_:
            code = exit_.code
        sys.stdout.flush()
    except KeyboardInterrupt:
        code = 130
    except BrokenPipeError:
        code = 1
    except PrismError as error:
        print_error(error)
        code = 1
    except ModuleNotFoundError as error:
        extra = _EXTRA_OF_MODULE.get((error.name or "").partition(".")[0])
        if extra is None:
            raise
        _print_failure(
            f"this command needs the Python package {error.name}",
            hint=f"pip install 'prismllm[{extra}]'",
        )
        code = 1
    except OSError as error:
        _print_os_error(error)
        code = 1
    except MemoryError:
        _print_failure(
            "out of memory",
            where=" ".join([Path(sys.argv[0]).name, *sys.argv[1:2]]),
            hint="use fewer --jobs where the command has them, fewer ranks at a time, or a machine "
            "with more memory",
        )
        code = 1
    except BaseException as error:
        # Polars' panics are no Exception; these are no bugs of anybody's.
        if type(error).__name__ != "PanicException":
            raise
        if "KeyboardInterrupt" in str(error):
            # Raised in a function that Polars' own code calls, which makes no use of errors.
            return 130
        if "spawn worker thread" not in str(error):
            raise
        _print_failure(
            str(error),
            where="Polars",
            hint="allow more processes (ulimit -u), or have it use fewer: POLARS_MAX_THREADS=1",
        )
        code = 1
    return code


def _require_threads() -> None:
    """Polars does not start without threads, and would say so in a page of its own.

    Raises:
        PrismError: the environment allows none.
    """
    said = os.environ.get("POLARS_MAX_THREADS")
    if said and not said.strip("0"):
        raise PrismError(
            "Polars cannot work with 0 threads",
            where=f"POLARS_MAX_THREADS={said}",
            hint="unset it, or set it to 1 or more",
        )


def _open_closed_streams() -> None:
    """Connect standard streams that the caller closed (`>&-`) with nothing.

    Python has None in their place, and the next file that is opened would get their number.
    """
    for number, name in ((1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is not None:
            continue
        try:
            os.fstat(number)
        except OSError:
            nothing = os.open(os.devnull, os.O_RDWR)
            if nothing != number:
                os.dup2(nothing, number)
                os.close(nothing)
        # Left open: it is a standard stream from now on.
        setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115


def _flush_stdout() -> bool:
    """Flush now, so that an output that takes no more costs no message at shutdown.

    False if stdout takes no more: its reader went away (`| head`), or its disk is full.
    """
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return False
    except ValueError:  # already closed
        pass
    return True


def _is_stdout_full() -> bool:
    """Whether it was stdout that took no more: writing to it fails without a name."""
    if not _flush_stdout():
        return True
    try:
        number = sys.stdout.fileno()
    except (OSError, ValueError):  # not a file
        return False
    try:
        # Nothing may be left to flush if stdout is unbuffered; devices refuse even no bytes.
        os.write(number, b"")
        regular = stat.S_ISREG(os.fstat(number).st_mode)
        return regular and os.statvfs(number).f_bavail == 0
    except OSError:
        return True


def _print_os_error(error: OSError) -> None:
    """An error of the operating system that no part of the toolkit expected."""
    hints = {
        errno.ENOENT: "check the path",
        errno.EACCES: "check who may read and write it",
        errno.ENOSPC: "free some space, or write to another disk",
        errno.EDQUOT: "free some space, or write to another disk",
        errno.EMFILE: "raise the limit of open files (ulimit -n)",
    }
    hint = hints.get(error.errno or 0, "check the disk or device")
    where = error.filename
    if where is None:
        where = "stdout" if _is_stdout_full() else "a temporary file or a device"
    _print_failure(error.strerror or str(error), where=where, hint=hint)


def print_error(error: PrismError) -> None:
    """Write `error: message [where]` and, indented, its hint to stderr."""
    _print_failure(error.message, where=error.where, hint=error.hint)


def _print_failure(message: str, *, where: object = None, hint: str | None = None) -> None:
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


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table to stdout; columns that hold only numbers are right-aligned.

    `None` becomes `-`. On a terminal Rich draws it and folds long cells to the width; into
    a file or pipe it is plain text with two spaces between columns and nothing cut.
    """
    raw = [list(row) for row in rows]
    right = [
        bool(raw) and all(row[i] is None or isinstance(row[i], numbers.Real) for row in raw)
        for i in range(len(columns))
    ]
    cells = [[_text(value) for value in row] for row in raw]
    if sys.stdout.isatty():
        _print_rich_table(title, columns, cells, right)
    else:
        _print_plain_table(title, columns, cells, right)


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
