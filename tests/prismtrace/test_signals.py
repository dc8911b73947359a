"""SIGTERM and SIGHUP end a command like Ctrl-C."""

from __future__ import annotations

import os
import signal

import pytest

from prismtrace.signals import stop_signals


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
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
    assert cleaned == [number]
    assert signal.getsignal(number) is signal.SIG_DFL


def test_what_the_caller_ignores_stays_ignored() -> None:
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stop_signals() as stopped:
            os.kill(os.getpid(), signal.SIGHUP)
        assert stopped == []
    finally:
        signal.signal(signal.SIGHUP, previous)
