"""Where the three commands begin: Ctrl-C ends them without a traceback from the first moment.

Loading a command takes a while, and Python answers Ctrl-C in it with a page of imports. Until
`exit_codes.run` takes over, the signal ends the process as it ends any other program. Only the
commands come here; to import a package changes nothing.
"""

from __future__ import annotations

from importlib import import_module

__all__ = ["prismcalib", "prismreplay", "prismtrace"]


def prismtrace() -> None:
    """Entry point of the command `prismtrace`."""
    _start("prismtrace.cli")


def prismcalib() -> None:
    """Entry point of the command `prismcalib`."""
    _start("prismcalib.cli")


def prismreplay() -> None:
    """Entry point of the command `prismreplay`."""
    _start("prismreplay.cli")


def _start(module: str) -> None:
    # What `signal` itself is made of: it alone would load a dozen modules first.
    signal = import_module("_signal")
    # Whoever ignores the signal for us (`nohup`, `&` in a script) keeps it ignored.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    import_module(module).main()
