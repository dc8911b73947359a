"""Record a true run: every rank writes a spool of what it does, and one trace is made of them.

The program and its launcher are as ever. Its processes find two environment variables and, when
they make their first process group, put ours around torch's own (`runtime.bootstrap`).
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from shlex import quote

from prismreplay.collect.logs import RankLogs
from prismreplay.collect.programs import ProgramCall
from prismreplay.errors import ProgramError, RankFailedError
from prismreplay.local_ranks import LOST, run_command, run_ranks, with_paths
from prismreplay.runtime.axes import axis_of
from prismtrace import __version__
from prismtrace.assembling import AssembleReport, assemble
from prismtrace.claiming import Claim
from prismtrace.errors import OutputError
from prismtrace.output import output_error, writable_target
from prismtrace.schema import TraceHeader, TraceKind
from prismtrace.spool import SPOOL_SUFFIX, read_spool

__all__ = ["RecordReport", "assemble_spools", "assembling_line", "record", "record_spools"]

_ROLE_VARIABLE = "PRISMREPLAY_ROLE"
_SPOOLS_VARIABLE = "PRISMREPLAY_SPOOLS"
_FACTORY = "prismreplay.runtime.recording:start"
_OTHER_SIZE = b"Received data size doesn't match"
"""gloo ends the process that receives, whoever sent too much."""
_ENTRY_POINT = "prismreplay.runtime.bootstrap:autoload"


@dataclass(frozen=True)
class RecordReport:
    """What was recorded.

    `run_s` is how long the program took, in seconds; `log_dir` where the output of ranks is that
    were started here, None if a launcher started them.
    """

    output: Path
    world_size: int
    ranks: tuple[int, ...]
    steps: tuple[int, ...]
    nodes: int
    groups: int
    policies: dict[str, int]
    run_s: float
    log_dir: Path | None


def record(
    words: Sequence[str],
    output: Path,
    *,
    program: ProgramCall | None = None,
    ranks: int = 1,
    log_dir: Path | None = None,
    quiet_stdout: bool = False,
    progress: Callable[[int], None] | None = None,
) -> RecordReport:
    """Run a program and write the trace of its ranks.

    The spools are beside the output while it runs; those of an earlier run there are removed.
    When the run fails they stay, see `assemble_spools`.

    Args:
        words: the command line: a launcher's, if there is no `program`.
        output: the trace; replaced once the run has succeeded.
        program: what to start `ranks` processes of, as torchrun would.
        ranks: how many.
        log_dir: where the output of these goes; None: beside the trace.
        quiet_stdout: pass output on to stderr only.
        progress: called with 1 after each rank's spool is read.

    Raises:
        ProgramError: the program cannot be started, or is none that communicates.
        RankFailedError: a rank failed, or the launcher did.
        OutputError: trace, spools or logs cannot be written, or another run writes them.
    """
    writable_target(output)
    spools = output.with_suffix(".spools")
    logs = log_dir or output.with_suffix(".logs")
    with contextlib.closing(Claim(spools)):
        _make_empty(spools)
        begun = time.monotonic()
        try:
            _run(words, spools, program, ranks, logs, quiet_stdout=quiet_stdout)
        except RankFailedError as error:
            raise _with_hint(error, spools, output) from error
        ran = time.monotonic() - begun
        made = assemble_spools(spools, output, progress=progress)
        shutil.rmtree(spools)
    return RecordReport(
        output=output,
        world_size=made.world_size,
        ranks=made.ranks,
        steps=made.steps,
        nodes=made.nodes,
        groups=made.groups,
        policies=made.policies,
        run_s=ran,
        log_dir=None if program is None else logs,
    )


def record_spools(
    words: Sequence[str],
    spools: Path,
    *,
    program: ProgramCall | None = None,
    ranks: int = 1,
    log_dir: Path | None = None,
) -> None:
    """As `record`, but leave the spools in a folder: this host's part of a job of several.

    Raises:
        OutputError: the folder cannot be written, or holds spools already.
    """
    if spools.is_dir() and _spools_in(spools):
        raise OutputError(
            "the folder holds spools of another run", where=str(spools), hint="name a new one"
        )
    logs = log_dir or spools
    # Logs in the same folder claim it themselves.
    alone = program is None or logs != spools
    with contextlib.closing(Claim(spools)) if alone else contextlib.nullcontext():
        _make_empty(spools)
        _run(words, spools, program, ranks, logs, quiet_stdout=False)


def _run(
    words: Sequence[str],
    spools: Path,
    program: ProgramCall | None,
    ranks: int,
    log_dir: Path,
    *,
    quiet_stdout: bool,
) -> None:
    """Run the program to its end, each rank writing its spool."""
    with _environment(spools) as environment:
        if program is None:
            code = run_command(words, environment, quiet=quiet_stdout)
            if code:
                raise _failure(words[0], code, spools)
        else:
            program.check()
            logs = RankLogs(log_dir, ranks, (0,), quiet_stdout)
            logs.prepare()
            run_ranks(program, ranks, environment, logs)
    if not _spools_in(spools):
        raise ProgramError(
            "the program made no process group: there is nothing to record",
            where=" ".join(words),
            hint="a program that trains on one rank must call init_process_group, too",
        )


def _spools_in(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"*{SPOOL_SUFFIX}"))


def assemble_spools(
    folder: Path, output: Path, *, progress: Callable[[int], None] | None = None
) -> AssembleReport:
    """Make the trace of a recorded run from its spools, also of one that failed.

    Then only the steps that all ranks finished are in it, if there are any.

    Raises:
        TraceError: see `prismtrace.assemble`.
    """
    facts = [read_spool(path).facts for path in _spools_in(folder)[:1]]
    header = None
    if facts:
        header = TraceHeader(
            kind=TraceKind.RECORDED,
            world_size=facts[0]["world_size"],
            ranks=(),
            created_by=f"prismreplay record {__version__}",
        )
    return assemble(folder, output, header=header, axis_of=axis_of, progress=progress)


def _make_empty(spools: Path) -> None:
    try:
        spools.mkdir(parents=True, exist_ok=True)
        for old in _spools_in(spools):
            old.unlink()
    except OSError as error:
        raise output_error(spools, error.errno or 0) from error


@contextmanager
def _environment(spools: Path) -> Iterator[Mapping[str, str]]:
    """The environment of recorded processes.

    torch finds our entry point in an installed package's metadata. Where we run from a source
    tree, a folder with nothing but that metadata stands in for it.
    """
    variables = {
        **os.environ,
        _ROLE_VARIABLE: _FACTORY,
        _SPOOLS_VARIABLE: str(spools.resolve()),
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "1",
    }
    variables.setdefault("OMP_NUM_THREADS", "1")
    # A stream that waits for a communication, to see its end, must not hold up the program's.
    variables.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    found = importlib.metadata.entry_points(group="torch.backends")
    if any(point.value == _ENTRY_POINT for point in found):
        yield variables
        return
    with tempfile.TemporaryDirectory(prefix="prismreplay-entry-") as folder:
        metadata = Path(folder) / f"prismllm_toolkit-{__version__}.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: prismllm-toolkit\nVersion: {__version__}\n",
            encoding="utf-8",
        )
        (metadata / "entry_points.txt").write_text(
            f"[torch.backends]\nprismreplay = {_ENTRY_POINT}\n", encoding="utf-8"
        )
        ours = str(Path(__file__).resolve().parent.parent)
        yield with_paths(variables, ours, folder)


def _failure(launcher: str, code: int, spools: Path) -> RankFailedError:
    """Which rank it was, as far as the spools tell."""
    reasons = {}
    for path in _spools_in(spools):
        facts = read_spool(path).facts
        if "failed" in facts:
            reasons[facts["rank"]] = facts["failed"]
    told = [f"rank {rank}: {reason}" for rank, reason in reasons.items()]
    how = f"ended with exit code {code}" if code > 0 else f"was killed by signal {-code}"
    return RankFailedError(f"{Path(launcher).name} {how}" + "".join(f"; {each}" for each in told))


def _with_hint(error: RankFailedError, spools: Path, output: Path) -> RankFailedError:
    if not _spools_in(spools):
        return error
    hint = f"what was recorded until then is kept: {assembling_line(spools, output)}"
    message, words = error.message, _last_words(error)
    if b"/gloo/" in words:
        hint = f"which ranks do not fit, and at which line, says `prismreplay collect`; {hint}"
        if _OTHER_SIZE in words:
            message += (
                ": it got more data than it expected, so another rank may be the one at fault"
            )
        elif any(word.encode() in words for word in LOST):
            message += ": another rank has left, and may be the one at fault"
    return RankFailedError(message, where=error.where, report=error.report, hint=hint)


def assembling_line(spools: Path, output: Path) -> str:
    """The command that makes a trace of what was recorded, to be typed as it is."""
    return f"prismreplay record --assemble {quote(str(spools))} -o {quote(str(output))}"


def _last_words(error: RankFailedError) -> bytes:
    """The end of the log of the rank that failed."""
    try:
        with Path(error.where or "").open("rb") as log:
            log.seek(0, os.SEEK_END)
            log.seek(max(0, log.tell() - 2048))
            return log.read()
    except OSError:
        return b""
