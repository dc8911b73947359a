"""SIGTERM and SIGHUP end a command like Ctrl-C."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FunctionType

import pydantic.plugin._schema_validator
import pytest

from prismtrace.signals import stop_signals


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_the_first_counts(number: signal.Signals) -> None:
    cleaned = []

    def run() -> None:
        with stop_signals() as stopped:
            try:
                os.kill(os.getpid(), number)
            finally:
                # Does not interrupt the cleaning up.
                os.kill(os.getpid(), signal.SIGTERM)
                cleaned.extend(stopped)

    with pytest.raises(KeyboardInterrupt):
        run()
    assert cleaned == [number] * (number != signal.SIGINT)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_when_all_is_over_raises_nothing(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, restored = signal.signal, []

    def late(what: int, handler: object) -> object:
        if what == number:
            os.kill(os.getpid(), number)  # its handler runs at once
            restored.append(what)
        return real(what, handler)  # type: ignore[arg-type]

    with stop_signals() as stopped:
        monkeypatch.setattr(signal, "signal", late)
    assert restored == [number]
    assert stopped == []


# An extension module that drops what it does not expect, in Python.
_DEAF = """
import os, signal, time
try:
    os.kill(os.getpid(), {number})
    time.sleep(0.05)
except BaseException:
    pass
imported = True
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_import_does_not_swallow_it(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "deaf.py").write_text(_DEAF.format(number=int(number)))
    monkeypatch.syspath_prepend(tmp_path)
    before = signal.getsignal(number), signal.getsignal(signal.SIGALRM)
    reached = []

    def run() -> None:
        with stop_signals():
            reached.append(importlib.import_module("deaf").imported)
            signal.pause()  # until what is due comes
            reached.append(False)

    try:
        with pytest.raises(KeyboardInterrupt):
            run()
    finally:
        sys.modules.pop("deaf", None)
    assert reached == [True]
    assert (signal.getsignal(number), signal.getsignal(signal.SIGALRM)) == before
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)


def test_an_import_by_python_code_is_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kill = f"import os, signal, time\nos.kill(os.getpid(), {int(signal.SIGINT)})\ntime.sleep(60)\n"
    (tmp_path / "inner.py").write_text(kill)
    (tmp_path / "outer.py").write_text("import inner\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(KeyboardInterrupt), stop_signals():
        importlib.import_module("outer")
    assert not {"inner", "outer"} & sys.modules.keys()


def test_an_import_by_compiled_code_is_not_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kill = f"import os, signal\nos.kill(os.getpid(), {int(signal.SIGINT)})\n"
    (tmp_path / "called.py").write_text(kill)
    monkeypatch.syspath_prepend(tmp_path)
    imported = []

    def run() -> None:
        with stop_signals():
            imported.append(__import__("called"))  # a builtin function
            signal.pause()  # until what is due comes

    try:
        with pytest.raises(KeyboardInterrupt):
            run()
    finally:
        sys.modules.pop("called", None)
    assert len(imported) == 1


def test_cleaning_up_after_an_import_is_not_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "inner.py").write_text(f"import os\nos.kill(os.getpid(), {int(signal.SIGINT)})\n")
    monkeypatch.syspath_prepend(tmp_path)
    cleaned = []

    def run() -> None:
        with stop_signals():
            try:
                importlib.import_module("inner")
            finally:
                time.sleep(0.05)
                cleaned.append(True)

    with pytest.raises(KeyboardInterrupt):
        run()
    assert cleaned == [True]


class _Finalized:
    def __del__(self) -> None:
        os.kill(os.getpid(), signal.SIGTERM)


def test_a_finalizer_does_not_swallow_it() -> None:
    def run() -> None:
        with stop_signals():
            _Finalized()
            signal.pause()  # until what is due comes

    with pytest.raises(KeyboardInterrupt):
        run()


def test_a_validator_that_is_being_made_does_not_swallow_it() -> None:
    # Compiled code that Pydantic calls looks types up, and drops whatever that raises.
    text = f"import os, signal\nos.kill(os.getpid(), {int(signal.SIGINT)})\n"
    code = compile(text, pydantic.plugin._schema_validator.__file__, "exec")
    made = []

    def run() -> None:
        with stop_signals():
            FunctionType(code, {})()
            made.append(True)
            signal.pause()  # until what is due comes

    with pytest.raises(KeyboardInterrupt):
        run()
    assert made == [True]


def test_a_process_that_is_being_started_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    started = []
    plain = subprocess.Popen._execute_child

    def _execute_child(*arguments: object, **named: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        plain(*arguments, **named)

    monkeypatch.setattr(subprocess.Popen, "_execute_child", _execute_child)

    def run() -> None:
        with stop_signals():
            started.append(subprocess.Popen([sys.executable, "-c", ""]))
            signal.pause()  # until what is due comes

    with pytest.raises(KeyboardInterrupt):
        run()
    assert started[0].wait() == 0


def test_an_import_that_takes_too_long_is_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "endless.py").write_text(
        f"import os, time\nos.kill(os.getpid(), {int(signal.SIGTERM)})\ntime.sleep(60)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("prismtrace.signals._LONGEST_WAIT_S", 0.05)
    with pytest.raises(KeyboardInterrupt), stop_signals():
        importlib.import_module("endless")


def test_what_the_caller_ignores_stays_ignored() -> None:
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stop_signals() as stopped:
            os.kill(os.getpid(), signal.SIGHUP)
        assert stopped == []
    finally:
        signal.signal(signal.SIGHUP, previous)
