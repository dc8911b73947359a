"""Which process a temporary file belongs to, and whether that process is gone.

A process that is killed (no memory left, a batch system's limit) cannot clean up. Names of its
temporary files carry a mark of the machine since its last start and the container, the number
of the process, and when it began: numbers are used again. What another machine, another
container or a live process has made is never taken for left over.
"""

from __future__ import annotations

import os
import re
import shutil
from contextlib import suppress
from functools import cache
from hashlib import blake2b
from pathlib import Path

__all__ = ["mark", "pid_namespace", "remove_left_over", "start_time", "stat_fields"]

_MARK = re.compile(r"([0-9a-f]{12})-(\d+)-(\d+)\.")


def mark() -> str:
    """The mark of this process."""
    pid = os.getpid()
    return f"{_place()}-{pid}-{start_time(pid) or 0}"


def remove_left_over(folder: Path, prefix: str) -> None:
    """Remove files and folders in `folder` called `prefix`, the mark of a dead process, a dot, ...

    What cannot be removed stays.
    """
    with suppress(OSError), os.scandir(folder) as entries:
        dead = [
            entry
            for entry in entries
            if entry.name.startswith(prefix) and _is_dead(entry.name[len(prefix) :])
        ]
        for entry in dead:
            with suppress(OSError):
                if entry.is_dir(follow_symlinks=False):
                    shutil.rmtree(entry)
                else:
                    Path(entry).unlink()


def start_time(pid: int) -> int | None:
    """When a process began, in ticks since the machine did; None if there is none."""
    fields = stat_fields(pid)
    return None if fields is None or fields[0] == "Z" else int(fields[19])


def stat_fields(pid: int) -> list[str] | None:
    """Fields of a process from its state on, as /proc has them; None if there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # The name in brackets may hold anything, also brackets and spaces.
    return text.rpartition(")")[2].split()


def pid_namespace() -> int:
    """Number of this process's pid namespace; 0 where there are none."""
    try:
        return Path("/proc/self/ns/pid").stat().st_ino
    except OSError:
        return 0


@cache
def _place() -> str:
    """This machine since its last start, and the container; of no use where neither is known."""
    boot = b""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_bytes()
    known = boot + str(pid_namespace()).encode() if boot else os.urandom(16)
    return blake2b(known, digest_size=6).hexdigest()


def _is_dead(rest: str) -> bool:
    found = _MARK.match(rest)
    if found is None or found[1] != _place():
        return False
    return start_time(int(found[2])) != int(found[3])
