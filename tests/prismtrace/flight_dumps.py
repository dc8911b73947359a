"""Flight-recorder dumps made up for tests: each rank's operations as a short script."""

from __future__ import annotations

import json
import pickle
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

WORLD = "0"
START_NS = 1_800_000_000_000_000_000
MS = 1_000_000


@dataclass
class Recorder:
    """The recorder of one rank, as torch 2.7 and later write it."""

    rank: int
    groups: Mapping[str, Sequence[int]]
    """Groups of the job; those of the rank are listed. Group ``0`` is everybody's."""
    capacity: int = 2000
    now_ns: int = START_NS
    entries: list[dict[str, Any]] = field(default_factory=list)
    seq: Counter[str] = field(default_factory=Counter)
    p2p_seq: Counter[str] = field(default_factory=Counter)
    op: Counter[str] = field(default_factory=Counter)

    def run(
        self,
        name: str = "all_reduce",
        state: str = "completed",
        *,
        group: str = WORLD,
        shape: Sequence[int] = (1024,),
        dtype: str = "Float",
        line: int = 10,
        seq: int | None = None,
        p2p: bool = False,
        **values: Any,
    ) -> None:
        """Enqueue a collective (or what the keywords say) and let it come to `state`."""
        if seq is None:
            if p2p:
                self.p2p_seq[group] += 1
            else:
                self.seq[group] += 1
            seq = self.seq[group]
        self.op[group] += 1
        self.now_ns += MS
        done = state == "completed"
        members = list(self.groups[group])
        gathers = name in ("all_gather", "_all_gather_base")
        output = [len(members) * shape[0], *shape[1:]] if gathers else list(shape)
        self.entries.append(
            {
                "record_id": len(self.entries),
                "pg_id": sorted(g for g in self.groups if self.rank in self.groups[g]).index(group),
                "process_group": (group, "default_pg" if group == WORLD else f"desc {group}"),
                "collective_seq_id": seq,
                "p2p_seq_id": self.p2p_seq[group],
                "op_id": self.op[group],
                "profiling_name": f"nccl:{name}",
                "time_created_ns": self.now_ns,
                "duration_ms": 0.25 if done else None,
                "input_sizes": [list(shape)],
                "input_dtypes": [dtype],
                "output_sizes": [output],
                "output_dtypes": [dtype],
                "state": state,
                "time_discovered_started_ns": None if state == "scheduled" else self.now_ns + 10,
                # The watchdog looks only so often.
                "time_discovered_completed_ns": self.now_ns + 1000 * MS if done else None,
                "retired": done,
                "timeout_ms": 600_000,
                "is_p2p": p2p,
                "thread_id": "1",
                "thread_name": "python",
                "frames": [
                    {
                        "name": "all_reduce",
                        "filename": "/x/site-packages/torch/distributed/distributed_c10d.py",
                        "line": 1,
                    },
                    {"name": "train_step", "filename": "train.py", "line": line},
                    {"name": "<module>", "filename": "train.py", "line": 99},
                ],
                **values,
            }
        )

    def send(self, peer: int, state: str = "completed", *, group: str = WORLD, **kw: Any) -> None:
        """Send to a global rank; alone, or as part of a `batch`."""
        here, there = self._group_ranks(group, peer)
        self.run(f"send {here}->{there}", state, group=group, p2p=True, **kw)

    def recv(self, peer: int, state: str = "completed", *, group: str = WORLD, **kw: Any) -> None:
        """Receive from a global rank."""
        here, there = self._group_ranks(group, peer)
        self.run(f"recv {here}<-{there}", state, group=group, p2p=True, **kw)

    def batch(
        self, *calls: tuple[str, int], state: str = "completed", group: str = WORLD, **kw: Any
    ) -> None:
        """A coalesced launch of sends and receives; only its last entry is watched."""
        self.seq[group] += 1
        for what, peer in calls:
            getattr(self, what)(peer, "scheduled", group=group, seq=self.seq[group], **kw)
        self.run(
            "coalesced",
            state,
            group=group,
            seq=self.seq[group],
            p2p=True,
            **{**kw, "input_sizes": [], "output_sizes": [], "input_dtypes": []},
        )

    def _group_ranks(self, group: str, peer: int) -> tuple[int, int]:
        members = list(self.groups[group])
        return members.index(self.rank), members.index(peer)

    def dump(self) -> dict[str, Any]:
        """What the recorder gives out."""
        own = {name: ranks for name, ranks in self.groups.items() if self.rank in ranks}
        return {
            "version": "2.10",
            "comm_lib_version": "2.27.5",
            "entries": self.entries[-self.capacity :],
            "pg_config": {
                name: {
                    "name": name,
                    "desc": "default_pg" if name == WORLD else f"desc {name}",
                    "ranks": str(list(ranks)),
                }
                for name, ranks in own.items()
            },
            "pg_status": {},
        }


def recorders(world_size: int, **groups: Sequence[int]) -> list[Recorder]:
    """One recorder a rank; `groups` beside the one of all ranks, which is called ``0``."""
    named = {WORLD: tuple(range(world_size)), **groups}
    return [Recorder(rank, named) for rank in range(world_size)]


def write_dumps(folder: Path, ranks: Sequence[Recorder], *, as_json: bool = False) -> list[Path]:
    """One file a rank, ``nccl_trace_rank_N``."""
    folder.mkdir(exist_ok=True)
    paths = []
    for recorder in ranks:
        path = folder / f"nccl_trace_rank_{recorder.rank}"
        dump = recorder.dump()
        path.write_bytes(json_dump(dump) if as_json else pickle.dumps(dump, protocol=2))
        paths.append(path)
    return paths


def json_dump(dump: dict[str, Any]) -> bytes:
    """The JSON form: no frames, 0 instead of null."""
    entries = [
        {key: value or 0 if "time" in key else value for key, value in entry.items()}
        for entry in dump["entries"]
    ]
    for entry in entries:
        del entry["frames"]
    return json.dumps({**dump, "entries": entries}).encode()
