"""Profiler traces of training jobs that never ran: what torch would have written, per rank.

    job = Job(tp=2, dp=2, pp=2, torch="2.4", layers=3, steps=2)
    files = job.write(folder)                # one .json per rank
    documents = job.documents()              # or as Python objects, by rank

A job is simulated on true time: the host of each rank launches ahead of the device, kernels of
a stream run one after the other, a collective starts when its rank gets there and ends on all
members at once. What is written is that truth as a rank's profiler sees it: with the host's
clock offset, relative to the file's base time, with the metadata of the torch version.

`Job.instances` holds the truth to compare with: (group name or pair, members, true end).
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

JsonEvent = dict[str, Any]

EPOCH_NS = 1_719_900_000_000_000_000
BASE_NS = 1_719_853_884_000_000_000
COMPUTE_STREAM = 7
MAIN, AUTOGRAD = 100, 200

_KERNELS = {
    "all_reduce": "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
    "all_gather": "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
    "reduce_scatter": "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(...)",
    "broadcast": "ncclDevKernel_Broadcast_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
    "all_to_all": "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)",
    "p2p": "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)",
}
_TORCH_NAMES = {
    "all_reduce": "allreduce",
    "all_gather": "_allgather_base",
    "reduce_scatter": "_reduce_scatter_base",
    "all_to_all": "all_to_allv",
}


@dataclass(frozen=True)
class Compute:
    """Kernels of one operator."""

    name: str
    dur_ns: int
    tid: int = MAIN
    stream: int = COMPUTE_STREAM
    kernels: int = 2


@dataclass(frozen=True)
class Collective:
    kind: str
    group: str
    nelems: int = 1 << 20
    tid: int = MAIN
    wait: bool = True


@dataclass(frozen=True)
class Exchange:
    """Sends and receives of one launch: pairs of ("send" or "recv", partner's rank)."""

    ops: tuple[tuple[str, int], ...]
    nelems: int = 1 << 18
    batched: bool = False
    tid: int = MAIN
    wait: bool = True


@dataclass(frozen=True)
class Mark:
    """An annotation around everything up to the next mark of the same level."""

    name: str
    level: int


Action = Compute | Collective | Exchange | Mark


@dataclass(frozen=True)
class Group:
    name: str
    desc: str
    ranks: tuple[int, ...]


@dataclass
class Job:
    """Shape of the job and of what its profilers record. Ranks count tp fastest, then dp, pp."""

    tp: int = 2
    dp: int = 2
    pp: int = 1
    layers: int = 2
    microbatches: int = 2
    steps: int = 1
    first_step: int = 3
    torch: str = "2.4"
    batched_p2p: bool = False
    cuda_sync: bool = False
    async_comms: bool = True
    """Collectives on streams of their own, with wait entries; else on the compute stream."""
    ranks_per_host: int = 8
    host_offset_ns: int = 0
    """How much later the clock of each host is than that of the one before."""
    host_names: bool = True
    base_step_ns: int = 0
    """How much later the base time of each rank's file is than that of the one before."""
    seed: int = 1
    programs: dict[int, list[Action]] | None = None
    """Own programs by rank instead of the training loop."""
    extra_groups: tuple[Group, ...] = ()
    instances: list[tuple[str, tuple[int, ...], int]] = field(default_factory=list)

    @property
    def world_size(self) -> int:
        return self.tp * self.dp * self.pp

    @property
    def version(self) -> tuple[int, int]:
        major, minor = self.torch.split(".")
        return int(major), int(minor)

    @cached_property
    def groups(self) -> list[Group]:
        """The default group, then those of tensor, data and pipeline parallelism."""
        world = range(self.world_size)
        found = [Group("0", "default_pg", tuple(world))]
        per_stage = self.tp * self.dp
        number = count(1)
        for desc, size, key in (
            ("TENSOR", self.tp, lambda r: r // self.tp),
            ("DATA", self.dp, lambda r: (r // per_stage, r % self.tp)),
            ("PIPELINE", self.pp, lambda r: r % per_stage),
        ):
            if size == 1:
                continue
            for value in dict.fromkeys(map(key, world)):
                ranks = tuple(r for r in world if key(r) == value)
                found.append(Group(str(next(number)), desc, ranks))
        return [*found, *self.extra_groups]

    @cached_property
    def groups_of(self) -> list[list[Group]]:
        """The groups of each rank, as its own process lists them."""
        found: list[list[Group]] = [[] for _ in range(self.world_size)]
        for group in self.groups:
            for rank in group.ranks:
                found[rank].append(group)
        return found

    def group_of(self, rank: int, desc: str) -> Group:
        return next(g for g in self.groups_of[rank] if g.desc == desc)

    def program(self, rank: int) -> Iterator[Action]:
        """The training loop of a rank (GPipe order), or its own program."""
        if self.programs is not None:
            yield from self.programs[rank]
            return
        jitter = Random(f"{self.seed}-{rank}")
        for step in range(self.first_step, self.first_step + self.steps):
            yield Mark(f"ProfilerStep#{step}", 0)
            for backward in (False, True):
                for _ in range(self.microbatches):
                    yield from self._microbatch(rank, jitter, backward=backward)
            if self.dp > 1:
                name = self.group_of(rank, "DATA").name
                yield Collective("reduce_scatter", name, 1 << 22, AUTOGRAD)
                yield Mark("Optimizer.step#Adam.step", 1)
                yield Compute("aten::_fused_adam_", 300_000)
                yield Collective("all_gather", name, 1 << 22)
            yield Mark("", 1)
        yield Mark("", 0)

    def _microbatch(self, rank: int, jitter: Random, *, backward: bool) -> Iterator[Action]:
        per_stage = self.tp * self.dp
        stage = rank // per_stage
        ahead, behind = rank + per_stage, rank - per_stage
        first, last = stage == 0, stage == self.pp - 1
        source, target = (ahead, behind) if backward else (behind, ahead)
        tid = AUTOGRAD if backward else MAIN
        if not (last if backward else first):
            yield Exchange((("recv", source),), batched=self.batched_p2p)
        for _ in range(self.layers):
            yield Compute("aten::mm", 200_000 + jitter.randrange(40_000), tid)
            if self.tp > 1:
                yield Collective("all_reduce", self.group_of(rank, "TENSOR").name, tid=tid)
        if not (first if backward else last):
            yield Exchange((("send", target),), batched=self.batched_p2p)

    def documents(self) -> dict[int, dict[str, Any]]:
        """The trace of every rank as torch would write it."""
        return {rank: self._document(recorder) for rank, recorder in simulate(self).items()}

    def write(self, folder: Path, ranks: list[int] | None = None) -> list[Path]:
        """Write ``rank<r>.json`` files and return their paths."""
        folder.mkdir(parents=True, exist_ok=True)
        paths = []
        for rank, document in self.documents().items():
            if ranks is None or rank in ranks:
                paths.append(folder / f"rank{rank}.json")
                paths[-1].write_text(json.dumps(document))
        return paths

    def _document(self, recorder: Recorder) -> dict[str, Any]:
        info: dict[str, Any] = {
            "backend": "nccl",
            "rank": recorder.rank,
            "world_size": self.world_size,
        }
        if self.version >= (2, 4):
            own = self.groups_of[recorder.rank]
            info |= {
                "pg_count": len(own),
                "pg_config": [
                    {
                        "pg_name": g.name,
                        "pg_desc": g.desc,
                        "backend_config": "cuda:nccl",
                        "pg_size": len(g.ranks),
                        "ranks": list(g.ranks),
                    }
                    for g in own
                ],
                "nccl_version": "2.21.5",
            }
        document: dict[str, Any] = {"schemaVersion": 1, "distributedInfo": info}
        if self.host_names:
            document["host_name"] = f"host{recorder.rank // self.ranks_per_host}"
        base = BASE_NS + self.base_step_ns * recorder.rank if self.version >= (2, 4) else 0
        offset = self.host_offset_ns * (recorder.rank // self.ranks_per_host)
        document["traceEvents"] = [self._timed(e, offset - base) for e in recorder.events]
        if base:
            document["baseTimeNanoseconds"] = base
        return document

    def _timed(self, event: JsonEvent, shift_ns: int) -> JsonEvent:
        start = event["ts"] + shift_ns
        if self.version >= (2, 4):
            # Three decimals, as text would have them; float64 holds them at this size.
            return {**event, "ts": round(start / 1000, 3), "dur": round(event["dur"] / 1000, 3)}
        end = (start + event["dur"]) // 1000
        return {**event, "ts": start // 1000, "dur": end - start // 1000}


# --- what a rank's profiler records ---------------------------------------------------------


class Recorder:
    """Events of one rank, times in true nanoseconds; the host's clock `now` only advances."""

    def __init__(self, job: Job, rank: int) -> None:
        self.job = job
        self.rank = rank
        self.events: list[JsonEvent] = []
        self.now = EPOCH_NS + 1_000 * rank
        self.stream_end: dict[int, int] = defaultdict(int)
        self.seq: dict[str, int] = defaultdict(lambda: 1)
        self.marks: dict[int, tuple[str, int]] = {}
        self.last_record: dict[int, int] = {}
        self._correlation = count(1000 + rank)

    def event(self, cat: str, name: str, start: int, dur: int, tid: int, **args: Any) -> JsonEvent:
        gpu = cat in ("kernel", "gpu_memcpy", "gpu_memset", "cuda_sync")
        event = {
            "ph": "X",
            "cat": cat,
            "name": name,
            "pid": self.rank % self.job.ranks_per_host if gpu else 5000 + self.rank,
            "tid": tid,
            "ts": start,
            "dur": dur,
            "args": args,
        }
        self.events.append(event)
        return event

    def call(self, name: str, tid: int, dur: int = 4_000) -> int:
        """A runtime call; returns its correlation."""
        correlation = next(self._correlation)
        self.event("cuda_runtime", name, self.now, dur, tid, correlation=correlation)
        self.now += dur + 1_000
        return correlation

    def kernel(
        self, name: str, stream: int, start: int, dur: int, correlation: int, **args: Any
    ) -> JsonEvent:
        self.stream_end[stream] = start + dur
        return self.event(
            "kernel", name, start, dur, stream,
            device=self.rank % 8, stream=stream, correlation=correlation, **args,
        )  # fmt: skip

    def start_on(self, stream: int) -> int:
        """Earliest start of a kernel that is launched now."""
        return max(self.now + 2_000, self.stream_end[stream] + 1_000)

    def let_wait(self, stream: int, source: int, tid: int) -> None:
        """What follows on `stream` waits for what `source` has been given so far."""
        record = self.call("cudaEventRecord", tid, 1_000)
        wait = self.call("cudaStreamWaitEvent", tid, 1_000)
        self.stream_end[stream] = max(self.stream_end[stream], self.stream_end[source])
        if self.job.cuda_sync:
            self.event(
                "cuda_sync", "Stream Wait Event", self.now, 0, stream,
                cuda_sync_kind="Stream Wait Event", wait_on_stream=source,
                wait_on_cuda_event_record_corr_id=record, wait_on_cuda_event_id=record,
                stream=stream, correlation=wait,
            )  # fmt: skip

    def metadata(self, kind: str, group: Group, nelems: int, seq: int, peer: str = "") -> JsonEvent:
        """Arguments of `record_param_comms` that this version knows, as on the kernel."""
        version = self.job.version
        if version < (2, 2):
            return {}
        size = len(group.ranks)
        sent = nelems // size if kind == "all_gather" else nelems
        received = nelems // size if kind == "reduce_scatter" else nelems
        unit = "size" if version < (2, 3) else "nelems"
        args: JsonEvent = {
            "Collective name": _TORCH_NAMES.get(kind, kind),
            f"In msg {unit}": sent,
            f"Out msg {unit}": received,
            "Group size": size,
            "dtype": "BFloat16",
            "In split size": "[]",
            "Out split size": "[]",
        }
        if version >= (2, 4):
            shown = list(group.ranks) if size <= 30 else [*group.ranks[:30], "..."]
            args |= {
                "Process Group Name": group.name,
                "Process Group Description": group.desc,
                "Process Group Ranks": "[" + ", ".join(map(str, shown)) + "]",
            }
        if version >= (2, 5) and peer:
            args[f"{'Dst' if kind == 'send' else 'Src'} Rank"] = int(peer)
        if version >= (2, 12):
            args |= {"Seq": seq, "Is asynchronized op": False}
        if version >= (2, 13):
            text = f"{group.name} {group.ranks} {seq}"
            args["Comms Id"] = int.from_bytes(sha256(text.encode()).digest()[:8])
        return args

    def record(self, group: Group, kind: str, nelems: int, seq: int, peer: str = "") -> JsonEvent:
        """Arguments of a `record_param_comms` entry that carries data."""
        version = self.job.version
        local = "0" if version >= (2, 6) else str(90_000 + int(group.name))
        place = str(group.ranks.index(int(peer or self.rank)))
        text = ["", str(seq) if version < (2, 6) else "", local if version < (2, 3) else "", place]
        text += ["", "[]", "[]"]
        types = ["TensorList", "Scalar", "Scalar", "Scalar", "", "ScalarList", "ScalarList"]
        if version >= (2, 3):
            text += ["0", "1"]
            types += ["Scalar", "Scalar"]
        if version >= (2, 2):
            text.append(str(len(group.ranks)))
            types.append("Scalar")
        size = len(group.ranks)
        return {
            "Concrete Inputs": text,
            "Input type": types,
            "Input Dims": [
                [[nelems // size if kind == "all_gather" else nelems]],
                *[[]] * (len(text) - 1),
            ],
            **self.metadata(kind, group, nelems, seq, peer),
            **({"Rank": group.ranks.index(int(peer))} if version >= (2, 5) and peer else {}),
        }

    def mark(self, mark: Mark) -> None:
        """Close the open annotation of this level (and below) and open the next one."""
        for level in [open_ for open_ in self.marks if open_ >= mark.level]:
            name, start = self.marks.pop(level)
            self.event("user_annotation", name, start, self.now - start, MAIN)
            self.now += 1_000
        if mark.name:
            self.marks[mark.level] = (mark.name, self.now)
            self.now += 500

    def compute(self, action: Compute) -> None:
        begin = self.now
        self.now += 2_000
        part = action.dur_ns // action.kernels
        for k in range(action.kernels):
            correlation = self.call("cudaLaunchKernel", action.tid)
            start = self.start_on(action.stream)
            self.kernel(f"void {action.name.rpartition(':')[2]}_kernel<{k}>(int)",
                        action.stream, start, part, correlation)  # fmt: skip
        name = action.name
        if action.tid == AUTOGRAD:
            name = "autograd::engine::evaluate_function: MmBackward0"
        self.event("cpu_op", name, begin, self.now - begin, action.tid)
        self.now += 1_000

    def wait(self, group: Group, seq: int, stream: int, tid: int) -> None:
        """The caller's stream waits for a communication."""
        begin = self.now
        self.now += 1_000
        self.let_wait(COMPUTE_STREAM, stream, tid)
        version = self.job.version
        text = [str(seq) if version < (2, 6) else "", "0", str(group.ranks.index(self.rank))]
        types = ["Scalar", "Scalar", "Scalar", "", "ScalarList", "ScalarList"]
        args: JsonEvent = {
            "Concrete Inputs": [*text, "", "[]", "[]"],
            "Input type": types,
            "Input Dims": [[]] * len(types),
        }
        if version >= (2, 2):
            args["Concrete Inputs"].append("1")
            args |= {"Collective name": "wait", "dtype": "Byte", "Group size": 1}
        self.event("cpu_op", "record_param_comms", begin, self.now - begin, tid, **args)
        self.now += 1_000


# --- the simulation -------------------------------------------------------------------------


@dataclass
class _Waiting:
    """A communication that a rank has launched: completed once all partners have."""

    action: Collective | Exchange
    start: int
    stream: int
    seq: int
    kernel: JsonEvent
    keys: tuple[Any, ...]


def simulate(job: Job) -> dict[int, Recorder]:
    """Run all ranks' programs; raises RuntimeError on a deadlock."""
    groups = {group.name: group for group in job.groups}
    recorders = {rank: Recorder(job, rank) for rank in range(job.world_size)}
    programs = {rank: job.program(rank) for rank in recorders}
    waiting: dict[int, _Waiting] = {}
    counters: dict[Any, int] = defaultdict(int)
    while programs:
        for rank in [r for r in programs if r not in waiting]:
            for action in programs[rank]:
                if isinstance(action, Mark):
                    recorders[rank].mark(action)
                elif isinstance(action, Compute):
                    recorders[rank].compute(action)
                else:
                    waiting[rank] = _launch(recorders[rank], action, groups, counters)
                    break
            else:
                del programs[rank]
        if programs and not _complete(job, recorders, waiting, groups):
            raise RuntimeError(f"deadlock: {waiting}")
    return recorders


def _launch(
    recorder: Recorder, action: Collective | Exchange, groups: dict[str, Group], counters: Any
) -> _Waiting:
    """Write the host's side of a communication and its kernel, whose end is not known yet."""
    rank, job = recorder.rank, recorder.job
    if isinstance(action, Collective):
        group = groups[action.group]
        kind, stream = action.kind, 20 + int(group.name) % 1000
        counters[rank, group.name] += 1
        keys: tuple[Any, ...] = ((group.name, counters[rank, group.name]),)
        parts = [(kind, "")]
    else:
        group = job.group_of(rank, "PIPELINE") if job.pp > 1 else groups["0"]
        kind, stream = "p2p", 60
        parts = [(direction, str(peer)) for direction, peer in action.ops]
        numbered = []
        for direction, peer in action.ops:
            pair = (rank, peer) if direction == "send" else (peer, rank)
            counters[rank, pair] += 1
            numbered.append((pair, counters[rank, pair]))
        keys = tuple(numbered)
    if not job.async_comms:
        stream = COMPUTE_STREAM
    batched = isinstance(action, Exchange) and action.batched
    tid = action.tid
    seq = recorder.seq[group.name]
    recorder.seq[group.name] += 1
    if stream != COMPUTE_STREAM and batched:
        recorder.let_wait(stream, COMPUTE_STREAM, tid)
    begin = recorder.now
    args: JsonEvent = {}
    for part, peer in parts:
        entry = recorder.now
        recorder.now += 2_000
        if stream != COMPUTE_STREAM and not batched:
            recorder.let_wait(stream, COMPUTE_STREAM, tid)
        if not batched:
            correlation = recorder.call("cudaLaunchKernelExC", tid)
            args = recorder.metadata(part, group, action.nelems, seq, peer)
        data = recorder.record(group, part, action.nelems, seq, peer)
        recorder.event("cpu_op", "record_param_comms", entry, recorder.now - entry, tid, **data)
        recorder.now += 500
    me = group.ranks.index(rank)
    titles = {
        "send": lambda peer: f"nccl:send {me}->{group.ranks.index(int(peer))}",
        "recv": lambda peer: f"nccl:recv {me}<-{group.ranks.index(int(peer))}",
    }
    title = titles.get(parts[0][0], lambda _: f"nccl:{parts[0][0]}")(parts[0][1])
    if batched:
        title = "nccl:coalesced"
        begin = recorder.now
        correlation = recorder.call("cudaLaunchKernelExC", tid)
    recorder.event("user_annotation", title, begin + 100, recorder.now - begin - 200, tid)
    start = recorder.start_on(stream)
    name = _KERNELS[kind]
    kernel = recorder.kernel(name, stream, start, 0, correlation, **args)
    return _Waiting(action, start, stream, seq, kernel, keys)


def _complete(
    job: Job,
    recorders: dict[int, Recorder],
    waiting: dict[int, _Waiting],
    groups: dict[str, Group],
) -> bool:
    """End every communication whose partners have all started; false if there is none."""
    members: dict[Any, list[int]] = defaultdict(list)
    for rank, state in waiting.items():
        for key in state.keys:
            members[key].append(rank)
    needed = {key: len(groups[key[0]].ranks) if isinstance(key[0], str) else 2 for key in members}
    ready = {
        rank
        for rank, state in waiting.items()
        if all(len(members[key]) == needed[key] for key in state.keys)
    }
    # A batch can only end when the batches of its partners can.
    while True:
        kept = {
            rank
            for rank in ready
            if all(member in ready for key in waiting[rank].keys for member in members[key])
        }
        if len(kept) == len(ready):
            break
        ready = kept
    clusters = _clusters(ready, waiting, members)
    for cluster in clusters:
        transfer = 5_000 + max(waiting[r].action.nelems for r in cluster) // 50
        end = max(waiting[r].start for r in cluster) + transfer
        noise = Random(f"{job.seed}-{end}")
        for rank in cluster:
            _finish(recorders[rank], waiting.pop(rank), end + noise.randrange(4_000), groups)
        job.instances.append((str(cluster), tuple(cluster), end))
    return bool(clusters)


def _clusters(
    ready: set[int], waiting: dict[int, _Waiting], members: dict[Any, list[int]]
) -> list[list[int]]:
    """Ranks that end together, sorted."""
    left = set(ready)
    found = []
    while left:
        cluster, todo = set(), [min(left)]
        while todo:
            rank = todo.pop()
            if rank not in cluster:
                cluster.add(rank)
                todo += [m for key in waiting[rank].keys for m in members[key]]
        left -= cluster
        found.append(sorted(cluster))
    return found


def _finish(recorder: Recorder, state: _Waiting, end: int, groups: dict[str, Group]) -> None:
    state.kernel["dur"] = end - state.start
    recorder.stream_end[state.stream] = end
    action = state.action
    if action.wait and state.stream != COMPUTE_STREAM:
        if isinstance(action, Collective):
            group = groups[action.group]
        else:
            group = (
                recorder.job.group_of(recorder.rank, "PIPELINE")
                if recorder.job.pp > 1
                else groups["0"]
            )
        recorder.wait(group, state.seq, state.stream, action.tid)
