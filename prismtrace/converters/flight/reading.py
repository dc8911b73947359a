"""One dump of the flight recorder as typed entries: pickle or JSON, all versions.

Times are those of the host: when an operation was enqueued, and when the watchdog noticed that
it had started or ended. They are no times of the GPU.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from prismtrace.converters.content import read_blocks, read_whole
from prismtrace.converters.flight.calls import comm_of, user_frame, world_of
from prismtrace.converters.flight.pickled import PlainPickleError, load_plain
from prismtrace.converters.groups import NamedGroup
from prismtrace.converters.kineto.carried import CommOp
from prismtrace.converters.kineto.records import parse_ranks
from prismtrace.errors import InputFileError

__all__ = ["Dump", "Entry", "State", "read_dump"]

State = str
"""``scheduled``, ``started`` or ``completed``."""

_STATES = ("scheduled", "started", "completed")
_MOST_ENTRIES = 1_000_000
_INT64 = range(-(2**63), 2**63)


@dataclass(frozen=True, slots=True)
class Entry:
    """One operation that a rank enqueued. Times in ns since the epoch, by the host's clock."""

    comm: CommOp
    name: str
    """As the recorder calls it, e.g. ``nccl:all_reduce`` or ``nccl:send 0->1``."""
    seq: int | None
    """Number within the group; operations of a coalesced launch share it, and a send or receive
    on its own has that of the collective before it."""
    p2p_seq: int | None
    """Number among the sends and receives of the group, for these."""
    state: State
    created_ns: int | None = None
    started_ns: int | None = None
    """When the watchdog noticed that it had started."""
    completed_ns: int | None = None
    """When the watchdog noticed that it had ended."""
    dur_ns: int | None = None
    """How long the GPU took, where ``TORCH_NCCL_ENABLE_TIMING`` was set."""
    timeout_ns: int | None = None
    timed_out: bool = False
    """No longer watched although it has not ended."""
    site: str | None = None
    """Where the program called it: the innermost frame that is not torch's own."""
    batch: int | None = None
    """Operations of one coalesced launch share a number."""


@dataclass(frozen=True)
class Dump:
    """What one rank's recorder held."""

    path: Path
    version: str
    entries: tuple[Entry, ...]
    """Oldest first."""
    groups: tuple[NamedGroup, ...]
    """Those of the rank, as far as the dump lists them."""
    world_size: int | None
    wrapped: bool
    """The buffer was full, so that older operations are missing."""
    counts: dict[str, int]
    """What had to be repaired or was not understood."""


def read_dump(path: Path) -> Dump:
    """Read a dump, gzipped or not.

    Raises:
        InputFileError: it cannot be read, would run code, or is no dump.
    """
    raw = _plain(path)
    # Versions before 2 may be nothing but the list of entries.
    top = {"entries": raw} if isinstance(raw, list) else raw
    if not isinstance(top, dict) or not isinstance(top.get("entries"), list):
        raise _no_dump(path, "there is no list of entries in it")
    rows = top["entries"]
    if len(rows) > _MOST_ENTRIES:
        raise _no_dump(path, f"{len(rows)} entries; at most {_MOST_ENTRIES} are believed")
    counts: Counter[str] = Counter()
    reader = _Entries(counts)
    entries = [entry for row in rows if (entry := reader.read(row)) is not None]
    if rows and not entries:
        raise _no_dump(path, "none of its entries can be read")
    groups = tuple(_groups(top.get("pg_config")))
    records = [row.get("record_id") for row in rows[:1] if isinstance(row, dict)]
    return Dump(
        path=path,
        version=str(top.get("version", "1"))[:_SHOWN],
        entries=tuple(_coalesced(entries, counts)),
        groups=groups,
        world_size=_world_size(groups, reader.worlds),
        wrapped=any(type(number) is int and number > 0 for number in records),
        counts={name: number for name, number in counts.items() if number},
    )


_SHOWN = 40


def _no_dump(path: Path, problem: str) -> InputFileError:
    return InputFileError(
        f"not a usable flight-recorder dump: {problem}",
        where=str(path),
        hint="pass the files that torch wrote (comm_lib_trace_rank_N or nccl_trace_rank_N), or "
        "what torch._C._distributed_c10d._dump_nccl_trace() or _dump_fr_trace() returned; without "
        "this file, its rank counts as one that left no dump",
    )


def _plain(path: Path) -> Any:
    damage: Counter[str] = Counter()
    data = read_whole(read_blocks(path, counts=damage), _no_dump(path, "it is larger than 1 GiB"))
    if damage:
        raise _no_dump(path, "the compressed data breaks off or is damaged")
    if not data:
        raise _no_dump(path, "it is empty")
    if data[:1] == b"\x80":
        try:
            return load_plain(data)
        except PlainPickleError as error:
            raise _no_dump(path, str(error)) from error
    import msgspec

    try:
        return msgspec.json.decode(data)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise _no_dump(path, "it is neither a pickle nor JSON") from error


def _groups(raw: Any) -> list[NamedGroup]:
    found: list[NamedGroup] = []
    for key, value in (raw if isinstance(raw, dict) else {}).items():
        if not isinstance(value, dict):
            continue
        name, ranks = str(value.get("name", key)), value.get("ranks")
        if isinstance(ranks, str):
            members = parse_ranks(ranks)
        else:
            listed = ranks if isinstance(ranks, list) else []
            members = tuple(rank for rank in listed if type(rank) is int) or None
        if name and members is not None and not any(rank not in _INT64 for rank in members):
            found.append(NamedGroup(name, str(value.get("desc", "")), members))
    return found


def _world_size(groups: tuple[NamedGroup, ...], worlds: Counter[int]) -> int | None:
    """Ranks of the job: those of its first group, else what its all_gathers agree on."""
    for group in groups:
        if "default_pg" in (group.name, group.desc) and group.ranks is not None:
            return max(group.ranks) + 1
    return next(iter(worlds)) if len(worlds) == 1 else None


def _integer(value: Any) -> int | None:
    if not isinstance(value, int) or isinstance(value, bool):
        return None
    number: int = value
    return number if number in _INT64 else None


def _time(value: Any) -> int | None:
    """JSON dumps write 0 where there is no time."""
    number = _integer(value)
    return number if number is not None and 0 < number < 2**62 else None


class _Entries:
    """Reads entries; what equal ones have in common is one object."""

    def __init__(self, counts: Counter[str]) -> None:
        self.counts = counts
        self.comms: dict[CommOp, CommOp] = {}
        self.texts: dict[str, str] = {}
        self.worlds: Counter[int] = Counter()

    def read(self, row: Any) -> Entry | None:
        """One entry; null and counted when it is none."""
        name = row.get("profiling_name") if isinstance(row, dict) else None
        if not isinstance(name, str):
            self.counts["dropped-entry"] += 1
            return None
        comm = comm_of(row, name, self.counts)
        if (world := world_of(row, comm)) is not None:
            self.worlds[world] += 1
        seq = _integer(row.get("collective_seq_id", row.get("seq_id")))
        state = row.get("state")
        started, completed = (
            _time(row.get(f"time_discovered_{what}_ns")) for what in ("started", "completed")
        )
        retired = row.get("retired") is True
        # gloo's entries stay scheduled. `pg_status` is no help: where a group also sends, its numbers
        # are of whatever came last.
        if completed is not None or (retired and name.startswith("gloo:")):
            state = "completed"
        elif started is not None and state == "scheduled":
            state = "started"
        site = user_frame(row.get("frames"))
        duration = row.get("duration_ms")
        timeout = _integer(row.get("timeout_ms"))
        return Entry(
            comm=self.comms.setdefault(comm, comm),
            name=self.texts.setdefault(name, name),
            seq=seq,
            p2p_seq=_integer(row.get("p2p_seq_id")) if comm.kind.is_p2p else None,
            state=state if state in _STATES else "scheduled",
            created_ns=_time(row.get("time_created_ns")),
            started_ns=started,
            completed_ns=completed,
            dur_ns=_duration_ns(duration),
            timeout_ns=timeout * 1_000_000 if timeout is not None and 0 < timeout < 1e9 else None,
            timed_out=retired and state != "completed",
            site=None if site is None else self.texts.setdefault(site, site),
        )


def _duration_ns(value: Any) -> int | None:
    if type(value) not in (int, float) or not 0 < value < 1e9:
        return None
    return round(float(value) * 1e6)


def _coalesced(entries: list[Entry], counts: Counter[str]) -> list[Entry]:
    """Give the operations of coalesced launches a batch, and the state of the whole launch.

    Such operations share a number and are followed by an entry ``…:coalesced`` with that
    number. Only that entry is watched, so that theirs stay scheduled.
    """
    found: list[Entry | None] = list(entries)
    open_run: dict[tuple[str | None, int | None], tuple[int | None, list[int]]] = {}
    batches = 0
    for position, entry in enumerate(entries):
        group = (entry.comm.group_name, entry.comm.local_group)
        seq, run = open_run.get(group, (None, []))
        if entry.name.partition(":")[2] != "coalesced":
            run = [*run, position] if seq == entry.seq and run else [position]
            open_run[group] = (entry.seq, run)
            continue
        open_run.pop(group, None)
        if seq != entry.seq or not run or entry.seq is None:
            continue  # versions that do not record what it consists of
        for member in run:
            found[member] = replace(
                entries[member],
                state=entry.state,
                started_ns=entry.started_ns,
                completed_ns=entry.completed_ns,
                dur_ns=entry.dur_ns,
                timed_out=entry.timed_out,
                batch=batches if len(run) > 1 else None,
            )
        found[position] = None
        batches += len(run) > 1
        counts["coalesced-launch"] += 1
    return [entry for entry in found if entry is not None]
