"""How slices are merged: the choices that a caller has."""

from __future__ import annotations

from dataclasses import dataclass

from prismcalib.campaign import Missing
from prismcalib.comm_table import CommTable
from prismcalib.samples import Reduce
from prismtrace.trace import PathLike, Trace

__all__ = ["SliceOptions"]


@dataclass(frozen=True, kw_only=True)
class SliceOptions:
    """How slices are merged; the flags of `prismcalib merge` that concern slices.

    Attributes:
        bare: the job without times; slices are checked against it.
        base: an earlier result, whose other ranks are kept.
        reduce: how several samples of one row become one.
        pool_steps: samples of the same operation in several steps are reduced too.
        warmup: first steps that count neither in pools nor in the step time.
        missing: what to do about ranks that no slice measured.
        unfold: give ranks that symmetry maps to others rows of their own.
        jobs: files read at once; 0: one per core.
        ranks_per_host: how many consecutive ranks share a host; transfers that no slice measured
            then come from `comm_table`, or from a model of the links.  None: they stay as seen.
        comm_table: measured times of communications, see `prismcalib comm-table`.
    """

    bare: Trace | PathLike | None = None
    base: Trace | PathLike | None = None
    reduce: Reduce = "median"
    pool_steps: bool = False
    warmup: int = 1
    missing: Missing = "fail"
    unfold: bool = False
    jobs: int = 0
    ranks_per_host: int | None = None
    comm_table: CommTable | PathLike | None = None
