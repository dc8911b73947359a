"""How level D runs commands and jobs: as forks of one process that has imported all they need.

A fresh interpreter that imports torch, polars and numba takes 5 to 10 s, and level D is some 60 of them.
`cold` ones are fresh all the same, in case forks fail here.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPO), str(REPO / "benchmarks/fidelity")]

import warm  # noqa: E402

from benchmarks.gpu.level_d_jobs import bounded  # noqa: E402

GRACE_S = 8.0


def prepare() -> None:
    """Import everything; from here on this process computes nothing, and forks."""
    warm.prepare(on_gpus=True)


@dataclass(frozen=True)
class Runner:
    """Runs what a part of the benchmark consists of.

    Attributes:
        title: of the part; files of what is printed bear it.
        folder: for these.
        cold: fresh interpreters in place of forks.
    """

    title: str
    folder: Path
    cold: bool = False

    def command(
        self, package: str, words: Sequence[object], limit_s: float, variables: Mapping[str, str]
    ) -> str:
        """One of our commands; what it printed.

        Raises:
            RuntimeError: it failed, or was ended; with the end of what it printed.
        """
        texts = list(map(str, words))
        if self.cold:
            call = (sys.executable, "-m", f"{package}.cli", *texts)
            return bounded(call, limit_s, variables)
        what = f"{package} {texts[0]}"
        return self.fork(what, warm.command(package, texts), limit_s, variables)

    def job(
        self, words: Sequence[str], ranks: int, limit_s: float, variables: Mapping[str, str]
    ) -> None:
        """All ranks of a script, as `torchrun` would start them on this host.

        Raises:
            RuntimeError: a rank failed, or they were ended.
        """
        variables = {"OMP_NUM_THREADS": "1", **variables}
        if self.cold:
            call = (sys.executable, __file__, str(ranks), self.folder / f"{self.title}.ranks")
            bounded((*call, *words), limit_s, variables)
            return
        self.fork(f"{ranks} ranks", lambda: warm.run_job(words, ranks), limit_s, variables)

    def fork(
        self,
        what: str,
        run: Callable[[], object],
        limit_s: float,
        variables: Mapping[str, str] | None = None,
    ) -> str:
        """Do something in a fork; what it printed.

        Raises:
            RuntimeError: it failed, or was ended.
        """
        files = [self.folder / f"{self.title} {what}.{end}" for end in ("out", "err")]
        for one in files:
            one.unlink(missing_ok=True)
        fork = warm.start(what, run, output=files[0], errors=files[1], environment=variables)
        code = "interrupted"
        try:
            code = wait(fork, limit_s)
        finally:
            if code:
                # Ranks that it has forked, too, which nobody waits for now.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(fork.pid, signal.SIGKILL)
        out, err = (one.read_text(errors="replace") for one in files)
        if code:
            raise RuntimeError(f"{what}\n{out[-2000:]}\n{err[-6000:].strip()}\n{code}")
        return out


def wait(fork: warm.Fork, limit_s: float) -> str:
    """Wait for the end of a fork, or bring it about; how it failed, empty if it did not."""
    code = fork.wait(max(0.0, limit_s))
    if code is not None:
        return f"exit code {code}" if code else ""
    # It may say where it was.
    os.killpg(fork.pid, signal.SIGINT)
    if fork.wait(GRACE_S) is None:
        fork.kill()
    return f"ended after {limit_s:.0f} s"


def main() -> None:
    """The ranks of a job, as fresh interpreters: NUMBER LOGS SCRIPT [ARGUMENTS]..."""
    from prismreplay.collect.logs import RankLogs
    from prismreplay.collect.programs import ProgramCall
    from prismreplay.errors import RankFailedError
    from prismreplay.local_ranks import run_ranks

    count, folder, script, *arguments = sys.argv[1:]
    logs = RankLogs(Path(folder), int(count), ())
    logs.prepare()
    try:
        run_ranks(ProgramCall(script, tuple(arguments)), int(count), os.environ, logs)
    except RankFailedError as error:
        sys.exit(f"{error.report}\n{error}")


if __name__ == "__main__":
    main()
