"""What dead runs left behind, and the names by which it is found.

A run keeps temporary files in one folder, `prismreplay-<namespace>-<pid>-<start>`. Its owner is
the process with that pid in that pid namespace, if it also began at that time: numbers of
processes are used again. A run whose owner is gone is dead; nothing of a live one, or of another
container, is ever touched.

Ranks die with their owner, but what they started may not. Each rank leads a process group,
which the folder lists; programs that a rank executed carry the run's name in their environment.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import tempfile
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from prismtrace.owners import pid_namespace, start_time, stat_fields

__all__ = [
    "RUN_VARIABLE",
    "Cleaned",
    "clean",
    "end_groups",
    "note_groups",
    "run_name",
]

RUN_VARIABLE = "PRISMREPLAY_RUN"
"""Environment variable that holds the name of the run in all its processes."""

_GROUPS_FILE = "process-groups"
_TRACKER = b"multiprocessing.resource_tracker"
_STARTING_S = 2.0
"""A process that has no command line yet may become a tracker; for so long it is waited for."""
_KILLED_S = 5.0
_NAME = re.compile(r"prismreplay-(\d+)-(\d+)-(\d+)")


@dataclass(frozen=True)
class Cleaned:
    """What was removed."""

    folders: tuple[str, ...] = ()
    processes: tuple[int, ...] = ()


def run_name(pid: int | None = None) -> str:
    """Name of the run that this process (or `pid`) owns."""
    owner = os.getpid() if pid is None else pid
    return f"prismreplay-{pid_namespace()}-{owner}-{start_time(owner)}"


def note_groups(folder: Path, leaders: Iterable[int]) -> None:
    """Write down which process groups belong to the run of `folder`."""
    lines = [f"{leader} {start_time(leader) or 0}" for leader in leaders]
    (folder / _GROUPS_FILE).write_text("\n".join(lines), encoding="ascii")


def clean(folder: Path | None = None) -> Cleaned:
    """End processes and remove folders of dead runs of this user; runs have theirs in `folder`."""
    parent = Path(tempfile.gettempdir()) if folder is None else folder
    dead = [entry for entry in parent.glob("prismreplay-*") if _is_dead_folder(entry)]
    groups: dict[int, int] = {}
    for entry in dead:
        groups.update(_groups_of(entry))
    processes = []
    for pid in _processes():
        if _is_left_over(pid, groups) and _TRACKER not in _command(pid):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
                processes.append(pid)
    folders = []
    for entry in dead:
        with contextlib.suppress(OSError):
            shutil.rmtree(entry)
            folders.append(str(entry))
    return Cleaned(tuple(folders), tuple(processes))


def end_groups(leaders: Collection[int]) -> None:
    """Kill all processes of these process groups.

    But not multiprocessing's trackers, which then remove the semaphores and shared memory that
    the killed ones had, and end by themselves. One in a system call that does not end stays until
    it does: that is not waited for.
    """
    wanted = {leader for leader in leaders if _has_members(leader)}
    begun = time.monotonic()
    patient_until, over = begun + _STARTING_S, begun + _KILLED_S
    while wanted and time.monotonic() < over:
        programs = {
            pid: _command(pid)
            for pid in _processes()
            if (fields := stat_fields(pid)) is not None
            and fields[0] != "Z"
            and int(fields[2]) in wanted
        }
        found = [pid for pid, command in programs.items() if command and _TRACKER not in command]
        starting = [pid for pid, command in programs.items() if not command]
        if starting and time.monotonic() < patient_until:
            time.sleep(0.001)
        else:
            found += starting
        if not found and not starting:
            return
        for pid in found:
            try:
                os.kill(pid, signal.SIGKILL)
            except PermissionError:
                return  # never of those that we started
            except ProcessLookupError:
                pass


def _has_members(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def _processes() -> Iterator[int]:
    return (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal())


def _command(pid: int) -> bytes:
    """A process's command line; empty while it starts another program, and if there is none."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def _is_dead(name: str) -> bool:
    match = _NAME.fullmatch(name)
    if match is None or int(match[1]) != pid_namespace():
        return False
    return start_time(int(match[2])) != int(match[3])


def _is_dead_folder(entry: Path) -> bool:
    try:
        mine = entry.lstat().st_uid == os.getuid() and entry.is_dir() and not entry.is_symlink()
    except OSError:
        return False
    return mine and _is_dead(entry.name)


def _groups_of(folder: Path) -> dict[int, int]:
    """The process groups of a run, with the start times of their leaders."""
    try:
        lines = (folder / _GROUPS_FILE).read_text(encoding="ascii").splitlines()
    except (OSError, ValueError):
        return {}
    pairs = [line.split() for line in lines]
    return {int(pair[0]): int(pair[1]) for pair in pairs if len(pair) == 2}


def _is_left_over(pid: int, groups: Mapping[int, int]) -> bool:
    fields = stat_fields(pid)
    if fields is None or pid == os.getpid() or fields[0] == "Z":
        return False
    try:
        if Path(f"/proc/{pid}").stat().st_uid != os.getuid():
            return False
        environment = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:  # another user's, or gone
        return False
    leader = int(fields[2])
    if leader in groups:
        # As long as a group has members, its number is not given to anybody else.
        leader_start = start_time(leader)
        return leader_start in (None, groups[leader]) and int(fields[19]) >= groups[leader]
    key = f"{RUN_VARIABLE}=".encode()
    return any(
        _is_dead(entry[len(key) :].decode(errors="replace"))
        for entry in environment.split(b"\0")
        if entry.startswith(key)
    )
