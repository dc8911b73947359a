"""Write down what the ranks of a stage do, operation by operation, in issue order.

The host issues operations in program order.  Each waits for the previous one on its stream, a
communication also for all computation issued before it, and a computation for the results of
the communications that it needs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from prismcalib.synth import sizes
from prismcalib.synth.layout import Axis, Channel, Layout
from prismcalib.synth.program import NODE_COLUMNS, Program, Stream
from prismcalib.synth.schedule import Pass, stage_order
from prismcalib.synth.spec import JobSpec
from prismtrace.schema import DType, Kind, Phase, ReduceOp

__all__ = ["stage_programs"]

_PROGRAM_COLUMNS = ("mean_ns", "channel", "seq", "peer_stage", "load")


def stage_programs(layout: Layout) -> list[Program]:
    """The programs of all stages, with p2p operations numbered alike on both sides."""
    writers = [_Writer(layout, stage) for stage in range(layout.spec.pp)]
    for writer in writers:
        writer.write_step()
    numbers: dict[tuple[Any, ...], int] = {}
    for writer in writers:
        numbers |= writer.sent
    return [writer.program(numbers) for writer in writers]


@dataclass(eq=False)
class _Writer:
    """Writes down the program of one stage, operation by operation."""

    layout: Layout
    stage: int
    columns: dict[str, list[Any]] = field(
        default_factory=lambda: {name: [] for name in (*NODE_COLUMNS, *_PROGRAM_COLUMNS)}
    )
    deps: list[list[int]] = field(default_factory=list)
    # Last operations of each stream; several if they form a batch.
    tails: dict[int, list[int]] = field(default_factory=dict)
    # Communications whose result the next computation needs.
    pending: list[int] = field(default_factory=list)
    counts: dict[Channel, int] = field(default_factory=dict)
    sent: dict[tuple[Any, ...], int] = field(default_factory=dict)
    received: dict[int, tuple[Any, ...]] = field(default_factory=dict)
    # What the rows now being written have in common.
    place: dict[str, Any] = field(default_factory=dict)
    batches: int = 0
    memory: int = 0

    @property
    def spec(self) -> JobSpec:
        return self.layout.spec

    # The step, from coarse to fine ------------------------------------------------------

    def write_step(self) -> None:
        spec = self.spec
        self.memory = sizes.weight_bytes(self.spec)
        self.place = {"phase": Phase.OTHER}
        self._compute("data", "data")
        order = stage_order(spec, self.stage)
        # With too few microbatches nothing alternates, and the neighbour coalesces nothing.
        coalesced = spec.coalesced_p2p and spec.pp - self.stage - 1 < spec.microbatches
        fetched = False
        for number, task in enumerate(order):
            if not fetched:
                self._p2p([self._receive(task)])
            self.place = task._asdict()
            if task.phase is Phase.FORWARD:
                self._forward(task)
            else:
                self._backward(task)
            following = order[number + 1] if number + 1 < len(order) else None
            turn = following is not None and following.phase != task.phase
            fetched = coalesced and turn
            fetch = self._receive(following) if fetched and following else None
            self._p2p([self._send(task), fetch])
        self.place = {"phase": Phase.OPTIMIZER}
        self._optimize()

    def _forward(self, task: Pass) -> None:
        if self._virtual(task) == 0:
            self._compute("embedding forward", "embedding fwd")
        for layer in self._layers(task.chunk):
            self._attention(layer, "forward")
            self._mlp(layer, task, "forward")
            self.memory += sizes.activation_bytes(self.spec)
        if self._virtual(task) == self.spec.pp * self.spec.chunks - 1:
            self._compute("head forward", "head fwd")

    def _backward(self, task: Pass) -> None:
        spec = self.spec
        if self._virtual(task) == spec.pp * spec.chunks - 1:
            self._compute("head backward", "head bwd")
        layers = self._layers(task.chunk)
        buckets = spec.buckets or len(layers)
        for number, layer in enumerate(reversed(layers), start=1):
            self._mlp(layer, task, "backward")
            self._attention(layer, "backward")
            self.memory -= sizes.activation_bytes(self.spec)
            full = number * buckets // len(layers) > (number - 1) * buckets // len(layers)
            if full and task.microbatch == spec.microbatches - 1:
                self._reduce_gradients(len(layers) / buckets)
        if self._virtual(task) == 0:
            self._compute("embedding backward", "embedding bwd")

    def _attention(self, layer: int, phase: str) -> None:
        self._block(f"attention {phase}", f"layer{layer}.attn {_SHORT[phase]}")

    def _mlp(self, layer: int, task: Pass, phase: str) -> None:
        short = _SHORT[phase]
        if not self.layout.has("ep"):
            self._block(f"mlp {phase}", f"layer{layer}.mlp {short}")
            return
        layers = self._layers(task.chunk)
        held = task.chunk * len(layers) + layer - layers[0]
        load = task.microbatch * self.spec.layers_per_stage + held
        if phase == "forward":
            self._compute("router forward", f"layer{layer}.router {short}")
        self._all_to_all("dispatch" if phase == "forward" else "combine grad", load)
        self._compute(f"experts {phase}", f"layer{layer}.experts {short}", load=load)
        self._all_to_all("combine" if phase == "forward" else "dispatch grad", load)
        if phase == "backward":
            self._compute("router backward", f"layer{layer}.router {short}")

    def _block(self, operation: str, name: str) -> None:
        """Computation of a tensor-parallel block with the communication around it."""
        sharded = self.spec.sequence_parallel
        if sharded:
            self._tensor(Kind.ALL_GATHER)
        self._compute(operation, name)
        self._tensor(Kind.REDUCE_SCATTER if sharded else Kind.ALL_REDUCE)

    def _optimize(self) -> None:
        # The norm is that of the reduced gradients.
        self.pending += self.tails.get(Stream.DP, [])
        self._compute("grad norm", "grad norm")
        if self.layout.has("world"):
            row = self._collective(
                Kind.ALL_REDUCE, "world", Stream.DP, "grad norm all_reduce", "world all_reduce", 4
            )
            self.pending = [row]
        self._compute("optimizer", "adam")
        buckets = self.spec.chunks * (
            self.spec.buckets or self.spec.layers_per_stage // self.spec.chunks
        )
        for axis, share in self._gradient_axes():
            part = share * self.spec.layers_per_stage / buckets
            for _ in range(buckets):
                self._collective(
                    Kind.ALL_GATHER,
                    axis,
                    Stream.DP,
                    f"{axis} param all_gather",
                    "dp all_gather",
                    int(sizes.layer_parameters(self.spec) * part) * self.spec.dtype.itemsize,
                    scale=part,
                )

    # Communication ----------------------------------------------------------------------

    def _tensor(self, kind: Kind) -> None:
        if self.layout.has("tp"):
            operation = f"tp {kind.value}"
            self.pending = [
                self._collective(
                    kind, "tp", Stream.TP, operation, operation, sizes.hidden_bytes(self.spec)
                )
            ]

    def _all_to_all(self, what: str, load: int) -> None:
        size = sizes.hidden_bytes(self.spec) * 2 // self.spec.tp
        self.pending = [
            self._collective(
                Kind.ALL_TO_ALL, "ep", Stream.EP, f"ep {what}", "ep all_to_all", size, load
            )
        ]

    def _reduce_gradients(self, layers: float) -> None:
        for axis, share in self._gradient_axes():
            self._collective(
                Kind.REDUCE_SCATTER,
                axis,
                Stream.DP,
                f"{axis} grad reduce_scatter",
                "dp reduce_scatter",
                int(sizes.layer_parameters(self.spec) * layers * share) * 4,
                scale=layers * share,
            )

    def _gradient_axes(self) -> list[tuple[Axis, float]]:
        """Groups that reduce gradients, and their shares of a layer's parameters."""
        if not self.layout.has("ep"):
            return [("dp", 1.0)] if self.layout.has("dp") else []
        experts: list[tuple[Axis, float]] = [("edp", 0.6)] if self.layout.has("edp") else []
        return [("dp", 0.4), *experts]

    def _collective(
        self,
        kind: Kind,
        axis: Axis,
        stream: Stream,
        name: str,
        operation: str,
        size: int,
        load: int = -1,
        scale: float = 1.0,
    ) -> int:
        channel = Channel(axis)
        gradients = kind is Kind.REDUCE_SCATTER and axis != "tp"
        return self._add(
            kind=kind,
            name=name,
            stream=stream,
            mean_ns=self.spec.mean(operation) * scale,
            channel=channel,
            seq=self._next(channel),
            bytes=size,
            dtype=DType.FLOAT32 if gradients or axis == "world" else self.spec.dtype,
            reduce_op=(ReduceOp.SUM if kind in (Kind.ALL_REDUCE, Kind.REDUCE_SCATTER) else None),
            load=load,
        )

    def _send(self, task: Pass) -> dict[str, Any] | None:
        """The message that carries a pass's result to the next stage, if there is one."""
        here = self._virtual(task)
        forward = task.phase is Phase.FORWARD
        there = here + 1 if forward else here - 1
        if self.spec.pp == 1 or not 0 <= there < self.spec.pp * self.spec.chunks:
            return None
        channel = Channel("pp", self.stage, there % self.spec.pp)
        return {
            **task._asdict(),
            "kind": Kind.SEND,
            "name": "send activation" if forward else "send gradient",
            "stream": Stream.SEND_FORWARD if forward else Stream.SEND_BACKWARD,
            "channel": channel,
            "peer_stage": channel.target,
            "message": (task.phase, task.microbatch, here),
        }

    def _receive(self, task: Pass) -> dict[str, Any] | None:
        """The message that a pass needs from another stage, if it does."""
        forward = task.phase is Phase.FORWARD
        there = self._virtual(task) + (-1 if forward else 1)
        if self.spec.pp == 1 or not 0 <= there < self.spec.pp * self.spec.chunks:
            return None
        channel = Channel("pp", there % self.spec.pp, self.stage)
        return {
            **task._asdict(),
            "kind": Kind.RECV,
            "name": "recv activation" if forward else "recv gradient",
            "stream": Stream.RECV_FORWARD if forward else Stream.RECV_BACKWARD,
            "channel": channel,
            "peer_stage": channel.source,
            "message": (task.phase, task.microbatch, there),
        }

    def _p2p(self, messages: list[dict[str, Any] | None]) -> None:
        """Issue messages, in one launch if there are several."""
        wanted = [message for message in messages if message is not None]
        batch = self.batches if len(wanted) > 1 else None
        self.batches += batch is not None
        size = sizes.hidden_bytes(self.spec) // (self.spec.tp if self.spec.sequence_parallel else 1)
        before = dict(self.tails)
        rows: list[int] = []
        for message in wanted:
            key = message.pop("message")
            row = self._add(
                **message,
                mean_ns=self.spec.mean("pp send_recv"),
                seq=-1,
                bytes=size,
                dtype=self.spec.dtype,
                batch=batch,
                tails=before,
            )
            rows.append(row)
            if message["kind"] is Kind.SEND:
                self.columns["seq"][row] = self.sent[key] = self._next(message["channel"])
            else:
                self.received[row] = key
        if batch is not None:
            self.tails[self.columns["stream"][rows[0]]] = rows
        # Nobody waits for a message to leave, unless it went together with one that arrives.
        self.pending += [row for row in rows if batch is not None or row in self.received]

    def _next(self, channel: Channel) -> int:
        number = self.counts.get(channel, 0)
        self.counts[channel] = number + 1
        return number

    # Rows -------------------------------------------------------------------------------

    def _compute(self, operation: str, name: str, load: int = -1) -> None:
        """A computation, in `kernels_per_block` rows."""
        parts = self.spec.kernels_per_block
        for part in range(parts):
            self._add(
                kind=Kind.COMPUTE,
                name=name if parts == 1 else f"{name} {part}",
                stream=Stream.COMPUTE,
                mean_ns=self.spec.mean(operation) / parts,
                load=load,
            )

    def _add(
        self,
        *,
        kind: Kind,
        stream: Stream,
        tails: dict[int, list[int]] | None = None,
        **values: Any,
    ) -> int:
        row = len(self.deps)
        on = stream.coalesced() if self.spec.coalesced_p2p else stream.value
        before = self.tails if tails is None else tails
        waits_for = {*before.get(Stream.COMPUTE, []), *before.get(on, []), *self.pending}
        self.deps.append(sorted(waits_for, reverse=True))
        self.tails[on] = [row]
        if kind is Kind.COMPUTE:
            self.pending = []
        workspace = sizes.workspace_bytes(self.spec) if kind is Kind.COMPUTE else 0
        values = {
            "load": -1,
            "seq": 0,
            "peer_stage": -1,
            **self.place,
            "mem_bytes": self.memory if self.spec.memory else None,
            "mem_peak_bytes": self.memory + workspace if self.spec.memory else None,
            **values,
            "kind": kind,
            "stream": on,
        }
        for name, column in self.columns.items():
            column.append(values.get(name))
        return row

    def program(self, numbers: dict[tuple[Any, ...], int]) -> Program:
        """The finished program; `numbers` are those of all messages sent by any stage."""
        columns = self.columns
        for row, key in self.received.items():
            columns["seq"][row] = numbers[key]
            channel = columns["channel"][row]
            self.counts[channel] = self.counts.get(channel, 0) + 1
        channels = tuple(self.counts)
        place: dict[Channel | None, int] = {channel: i for i, channel in enumerate(channels)}
        place[None] = -1
        counts = [len(deps) for deps in self.deps]
        distance = [row - dep for row, deps in enumerate(self.deps) for dep in deps]
        last = sorted({row for rows in self.tails.values() for row in rows}, reverse=True)
        return Program(
            stage=self.stage,
            columns={name: columns[name] for name in NODE_COLUMNS},
            mean_ns=np.array(columns["mean_ns"], np.float64),
            channels=channels,
            counts=np.array([self.counts[channel] for channel in channels], np.int64),
            channel=np.array([place[channel] for channel in columns["channel"]], np.int16),
            seq=np.array(columns["seq"], np.int64),
            peer_stage=np.array(columns["peer_stage"], np.int64),
            load=np.array(columns["load"], np.int32),
            loads=self.spec.microbatches * self.spec.layers_per_stage,
            dep_offsets=np.cumsum([0, *counts]).astype(np.int32),
            dep_distance=np.array(distance, np.int32),
            tails=np.array([len(self.deps) - row for row in last], np.int32),
        )

    def _virtual(self, task: Pass) -> int:
        """Position of a chunk in the whole model."""
        return task.chunk * self.spec.pp + self.stage

    def _layers(self, chunk: int) -> range:
        """Numbers of the layers of a chunk, in the whole model."""
        size = self.spec.layers_per_stage // self.spec.chunks
        first = (chunk * self.spec.pp + self.stage) * size
        return range(first, first + size)


_SHORT = {"forward": "fwd", "backward": "bwd"}
