"""What a made-up training job looks like."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

from prismcalib.errors import CalibError
from prismtrace.schema import DType

__all__ = ["MEAN_NS", "JobSpec"]

MEAN_NS: Mapping[str, int] = MappingProxyType(
    {
        "data": 150_000,
        "embedding forward": 120_000,
        "embedding backward": 200_000,
        "attention forward": 900_000,
        "attention backward": 1_900_000,
        "mlp forward": 1_000_000,
        "mlp backward": 2_000_000,
        "router forward": 60_000,
        "router backward": 90_000,
        "experts forward": 900_000,
        "experts backward": 1_800_000,
        "head forward": 700_000,
        "head backward": 1_300_000,
        "grad norm": 250_000,
        "optimizer": 2_500_000,
        # Transfers, from the arrival of the last member on.
        "tp all_reduce": 180_000,
        "tp all_gather": 95_000,
        "tp reduce_scatter": 95_000,
        "ep all_to_all": 250_000,
        "pp send_recv": 110_000,
        "dp reduce_scatter": 1_500_000,
        "dp all_gather": 900_000,
        "world all_reduce": 60_000,
    }
)
"""Mean duration of every operation, in ns; computations are per layer and microbatch."""


@dataclass(frozen=True, kw_only=True)
class JobSpec:
    """A training job: how it is spread over ranks, what it does, how unevenly it does it.

    Attributes:
        pp, tp, dp: sizes of the pipeline, tensor and data axes; the world has their product.
            Ranks count with tp fastest, then dp, then pp.
        ep: expert ranks, a part of the data axis: `ep` neighbours on it share the experts of
            every layer.  1: dense layers.
        microbatches: per step.
        layers_per_stage: transformer layers that a rank holds, over all its chunks.
        schedule: `1f1b`, or `interleaved` with several model chunks per rank.
        chunks: model chunks per rank; 1 with `1f1b`.
        steps: training steps.
        seed: all randomness follows from it.
        sequence_parallel: all_gather and reduce_scatter around every block instead of one
            all_reduce behind it.
        coalesced_p2p: in steady state send forward and receive backward in one launch
            (a batch), and vice versa; only with `1f1b`.
        kernels_per_block: rows that a block's computation is split into.
        buckets: gradient buckets per chunk; None: one per layer.
        hidden, sequence, dtype: determine bytes and memory only.
        mean_ns: replaces entries of `MEAN_NS`.
        jitter: relative spread (sigma of a log-normal) of each computation.
        step_jitter: the same, of all computations of one rank in one step together.
        comm_jitter: the same, of each transfer.
        end_spread_ns: members of one operation end within this time of each other.
        stragglers: rank -> factor on its computations.
        moe_imbalance: sigma of the load of a rank's experts, anew in every layer.
        launch_gap_ns: mean idle time before each operation after its dependencies have ended.
        memory: fill `mem_bytes` and `mem_peak_bytes`.

    Raises:
        CalibError: the numbers do not fit together; `where` names the attribute.
    """

    pp: int = 2
    tp: int = 2
    dp: int = 2
    ep: int = 1
    microbatches: int = 4
    layers_per_stage: int = 2
    schedule: Literal["1f1b", "interleaved"] = "1f1b"
    chunks: int = 1
    steps: int = 1
    seed: int = 0
    sequence_parallel: bool = False
    coalesced_p2p: bool = False
    kernels_per_block: int = 1
    buckets: int | None = None
    hidden: int = 4096
    sequence: int = 4096
    dtype: DType = DType.BFLOAT16
    mean_ns: Mapping[str, int] = field(default_factory=dict)
    jitter: float = 0.03
    step_jitter: float = 0.02
    comm_jitter: float = 0.05
    end_spread_ns: int = 5_000
    stragglers: Mapping[int, float] = field(default_factory=dict)
    moe_imbalance: float = 0.2
    launch_gap_ns: int = 0
    memory: bool = True

    def __post_init__(self) -> None:
        for name in ("pp", "tp", "dp", "ep", "microbatches", "layers_per_stage", "chunks"):
            _demand(getattr(self, name) >= 1, name, "is at least 1")
        for name in ("steps", "kernels_per_block", "hidden", "sequence"):
            _demand(getattr(self, name) >= 1, name, "is at least 1")
        for name in ("jitter", "step_jitter", "comm_jitter", "moe_imbalance"):
            _demand(0 <= getattr(self, name) <= 2, name, "lies between 0 and 2")
        for name in ("seed", "end_spread_ns", "launch_gap_ns"):
            _demand(getattr(self, name) >= 0, name, "is not negative")
        _demand(self.dp % self.ep == 0, "ep", f"divides dp={self.dp}")
        _demand(
            self.layers_per_stage % self.chunks == 0,
            "chunks",
            f"divides layers_per_stage={self.layers_per_stage}",
        )
        if self.schedule == "interleaved":
            _demand(self.pp > 1, "schedule", "interleaves only with pp > 1")
            _demand(self.chunks > 1, "chunks", "is above 1 with the interleaved schedule")
            _demand(not self.coalesced_p2p, "coalesced_p2p", "goes with the 1f1b schedule only")
            _demand(
                self.microbatches % self.pp == 0,
                "microbatches",
                f"is a multiple of pp={self.pp} with the interleaved schedule",
            )
        else:
            _demand(self.schedule == "1f1b", "schedule", "is 1f1b or interleaved")
            _demand(self.chunks == 1, "chunks", "is 1 with the 1f1b schedule")
        layers = self.layers_per_stage // self.chunks
        _demand(
            self.buckets is None or 1 <= self.buckets <= layers,
            "buckets",
            f"lies between 1 and the {layers} layers of a chunk",
        )
        unknown = sorted(set(self.mean_ns) - set(MEAN_NS))
        _demand(not unknown, "mean_ns", f"has no entry {', '.join(map(repr, unknown))}")
        _demand(
            all(0 <= mean < 10**12 for mean in self.mean_ns.values()),
            "mean_ns",
            "lies between 0 and 1 000 s",
        )
        for rank, factor in self.stragglers.items():
            _demand(0 <= rank < self.world_size, "stragglers", f"has a rank {rank} of no one")
            _demand(0 < factor < 1000, "stragglers", "has factors between 0 and 1000")

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.pp * self.tp * self.dp

    @property
    def ranks_per_stage(self) -> int:
        """Ranks of a pipeline stage; they have consecutive numbers."""
        return self.tp * self.dp

    def mean(self, operation: str) -> int:
        """Mean duration of an operation of `MEAN_NS`, in ns."""
        return self.mean_ns.get(operation, MEAN_NS[operation])


def _demand(holds: bool, attribute: str, rule: str) -> None:
    if not holds:
        raise CalibError(f"no such job: {attribute} {rule}", where=f"JobSpec.{attribute}")
