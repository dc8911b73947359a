from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pty
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from prismtrace import console, exit_codes
from prismtrace.errors import InputFileError

PROGRAM = '''
import sys
from prismtrace import console, exit_codes
from prismtrace.errors import InputFileError

app = console.new_app("A program for tests.")

@app.command()
def bad():
    """Fail as commands fail."""
    raise InputFileError("not JSON", where="rank0.json", hint="convert it again")

@app.command()
def unreadable():
    """Fail in the operating system."""
    open("/nonexistent/trace.json")

@app.command()
def extra():
    """Miss an optional package."""
    raise ModuleNotFoundError("no numba", name="numba.core")

@app.command()
def bug():
    """Fail by mistake."""
    raise ZeroDivisionError("ours")

@app.command()
def interrupted():
    """Be stopped."""
    raise KeyboardInterrupt

@app.command()
def much():
    """Print more than a pipe holds."""
    for number in range(200_000):
        print(number)

@app.command()
def bar():
    """Show progress."""
    with console.progress("reading [x]", total=2) as bar:
        bar.advance(2)
        bar.describe("done")
    print("result")

exit_codes.run(app)
'''


@pytest.fixture
def program(tmp_path: Path, command_env) -> tuple[list[str], dict[str, str]]:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return [sys.executable, str(path)], command_env


def _run(program, *words: str) -> subprocess.CompletedProcess[str]:
    command, env = program
    return subprocess.run([*command, *words], env=env, capture_output=True, text=True, check=False)


def test_an_error_is_one_message_with_place_and_hint(program):
    done = _run(program, "bad")
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr == "error: not JSON [rank0.json]\n  hint: convert it again\n"


def test_polars_without_threads_is_told(monkeypatch, capsys):
    monkeypatch.setenv("POLARS_MAX_THREADS", "0")
    monkeypatch.setattr("sys.argv", ["program"])
    with pytest.raises(SystemExit) as ended:
        exit_codes.run(console.new_app("A program for tests."))
    assert ended.value.code == 1
    assert capsys.readouterr().err.splitlines() == [
        "error: Polars cannot work with 0 threads [POLARS_MAX_THREADS=0]",
        "  hint: unset it, or set it to 1 or more",
    ]


def test_polars_that_gets_no_threads_is_told(monkeypatch, capsys):
    class PanicException(BaseException):
        """As that of Polars, which is no Exception either."""

    app = console.new_app("A program for tests.")

    @app.command()
    def main(what: str) -> None:
        raise PanicException(what)

    def ended(what: str) -> object:
        monkeypatch.setattr("sys.argv", ["program", "main", what])
        with pytest.raises(SystemExit) as caught:
            exit_codes.run(app)
        return caught.value.code

    assert ended("OS can't spawn worker thread: Resource temporarily unavailable") == 1
    said = capsys.readouterr().err
    assert said.startswith("error: OS can't spawn worker thread")
    assert "ulimit -u" in said
    assert (
        ended("called `Result::unwrap()` on an `Err` value: PyErr { type: KeyboardInterrupt }")
        == 130
    )
    assert not capsys.readouterr().err
    with pytest.raises(PanicException):
        ended("a bug")


def test_an_os_error_names_the_path(program):
    done = _run(program, "unreadable")
    assert done.returncode == 1
    assert done.stderr == (
        "error: No such file or directory [/nonexistent/trace.json]\n  hint: check the path\n"
    )


def test_a_missing_extra_says_what_to_install(program):
    done = _run(program, "extra")
    assert done.returncode == 1
    assert "pip install 'prismllm-toolkit[calib]'" in done.stderr


def test_a_bug_keeps_its_traceback(program):
    done = _run(program, "bug")
    assert done.returncode == 1
    assert "Traceback" in done.stderr


@pytest.mark.parametrize(
    ("words", "code"), [(["interrupted"], 130), (["nope"], 2), (["bad", "x"], 2)]
)
def test_exit_codes(program, words, code):
    assert _run(program, *words).returncode == code


def test_a_reader_that_goes_away_causes_no_message(program):
    command, env = program
    with subprocess.Popen(
        [*command, "much"], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as running:
        running.stdout.readline()
        running.stdout.close()
        assert running.stderr.read() == b""


def test_progress_is_silent_without_a_terminal(program):
    done = _run(program, "bar")
    assert (done.stdout, done.stderr) == ("result\n", "")


def test_what_takes_long_prints_lines_without_a_terminal(capsys, monkeypatch):
    def work(total=None):
        monkeypatch.setattr("prismtrace.progress_bar._LINES_SECONDS", 0.0)
        with console.progress("slicing", total, lines=True) as bar:
            bar.describe("slicing: slice 0")
            bar.advance(2)
            monkeypatch.setattr("prismtrace.progress_bar._LINES_SECONDS", 1e6)
            bar.describe("slicing: slice 1")
            bar.advance()
        out, err = capsys.readouterr()
        assert out == ""
        return re.sub(r"[\d.]+ s\b", "0 s", err, flags=re.MULTILINE).splitlines()

    now_and_then = ["slicing: slice 0 (0 s)", "slicing: slice 0 (0 s)"]
    assert work() == ["slicing ...", *now_and_then, "slicing: done in 0 s"]
    # The command that runs this one says when it begins and ends.
    monkeypatch.setenv("PRISMTRACE_WITHIN", "emulate")
    assert work() == now_and_then
    assert work(total=8) == [now_and_then[0], "slicing: slice 0 (0 s, 25%)"]


def test_what_tells_nothing_prints_lines_by_the_clock(capsys, monkeypatch):
    monkeypatch.setattr("prismtrace.progress_bar._LINES_SECONDS", 0.01)
    err = ""

    def wait_for(line):
        nonlocal err
        limit = time.monotonic() + 30
        while not re.search(line, err) and time.monotonic() < limit:
            time.sleep(0.01)
            err += capsys.readouterr().err
        assert re.search(line, err)

    with console.progress("merging", 8) as bar:
        wait_for(r"merging \(\d+ s\)\n")
        bar.advance(2)
        wait_for(r"merging \(\d+ s, 25%\)\n")
        bar.describe("writing")
        wait_for(r"writing \(\d+ s, 25%\)\n")
    capsys.readouterr()
    time.sleep(0.05)
    assert capsys.readouterr() == ("", "")


def test_what_fails_is_not_told_as_done(capsys):
    with pytest.raises(ValueError, match="no"), console.progress("slicing", lines=True):
        raise ValueError("no")
    assert capsys.readouterr().err == "slicing ...\n"


def test_progress_shows_on_a_terminal_and_stays_off_stdout(program):
    command, env = program
    ours, theirs = pty.openpty()
    done = subprocess.run(
        [*command, "bar"],
        env={**env, "TERM": "xterm"},
        stdout=subprocess.PIPE,
        stderr=theirs,
        check=True,
    )
    os.close(theirs)
    seen = b""
    # The end of a terminal is an error; what was written comes in pieces.
    with contextlib.suppress(OSError):
        while piece := os.read(ours, 65536):
            seen += piece
    os.close(ours)
    assert done.stdout == b"result\n"
    assert b"reading [x]" in seen


def test_table_aligns_numbers_right_and_shows_null_as_dash(capsys):
    console.table("Kinds", ["kind", "count"], [["all_reduce", np.int64(7)], ["[x]", None]])
    assert capsys.readouterr().out.splitlines() == [
        "Kinds",
        "kind        count",
        "----------  -----",
        "all_reduce      7",
        "[x]             -",
    ]


def test_empty_table_still_has_its_head(capsys):
    console.table("", ["a"], [])
    assert capsys.readouterr().out == "a\n-\n"


def test_print_json_takes_nested_results(capsys):
    @dataclasses.dataclass(frozen=True)
    class Result:
        path: Path
        values: object

    console.print_json({"r": Result(Path("x"), [np.int64(1 << 62), {"s": frozenset({2, 1})}])})
    assert json.loads(capsys.readouterr().out) == {
        "r": {"path": "x", "values": [1 << 62, {"s": [1, 2]}]}
    }


def test_print_json_refuses_what_is_not_json():
    with pytest.raises(ValueError, match="not JSON compliant"):
        console.print_json({"x": float("nan")})
    with pytest.raises(TypeError, match="object cannot be written"):
        console.print_json(object())


def test_print_error_without_place_or_hint(capsys):
    console.print_error(InputFileError("empty"))
    assert capsys.readouterr().err == "error: empty\n"


def test_heads_of_tables_are_printable_too(capsys):
    console.table("", ["a\x1b[31m", "b"], [(1, 2)])
    console.row_or_table(["\x07" + "long" * 40], [("x",)])
    shown = capsys.readouterr().out
    assert "a\\x1b[31m" in shown
    assert "\\x07long" in shown
    assert not {"\x1b", "\x07"} & set(shown)
