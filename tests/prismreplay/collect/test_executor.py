"""The executor against real gloo, bit for bit; and what gloo cannot do."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from prismreplay.collect.executor import Executor
from prismreplay.collect.handover import Files, Parcel, ParcelWriter, Place
from prismreplay.collect.matching import Instance, Request
from prismreplay.errors import UnsupportedOperationError
from prismreplay.runtime.operations import Call
from prismreplay.runtime.payloads import spec_of
from prismtrace.schema import DType, ReduceOp
from tests.prismreplay.collect.gloo_ranks import on_gloo
from tests.prismreplay.collect.members import op_of, perform

FLOATS = ("float32", "bfloat16", "float16", "float64")
SIZES = (1, 7, 999, 50_001, 300_001)  # the last is more than a MiB, twice for float64
EXTREMES = (float("nan"), float("inf"), -float("inf"), 0.0, -0.0)


@functools.cache
def values(rank: int, elements: int, dtype: str, *, wild: bool = False) -> torch.Tensor:
    """Numbers of very different size, whose sum depends on the order."""
    generator = torch.Generator().manual_seed(1000 * elements + rank)
    kind = getattr(torch, dtype)
    if not kind.is_floating_point:
        return torch.randint(0, 100, (elements,), generator=generator).to(kind)
    scale = 10.0 ** torch.randint(-2, 3, (elements,), generator=generator)
    found = (torch.randn(elements, generator=generator) * scale).to(kind)
    if wild:
        places = torch.randint(0, elements, (elements // 2,), generator=generator)
        picks = torch.randint(0, len(EXTREMES), (elements // 2,), generator=generator)
        found[places] = torch.tensor(EXTREMES)[picks].to(kind)
    return found


def reductions() -> Iterator[tuple[str, int, ReduceOp, bool]]:
    """Element type, number of elements, reduction, with infinities and the like."""
    for dtype in FLOATS:
        for elements in SIZES:
            yield dtype, elements, ReduceOp.SUM, False
        for op in (ReduceOp.AVG, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.SUM):
            yield dtype, 999, op, True
    for dtype in ("int64", "int32", "int8", "uint8"):
        whole = set(ReduceOp) - {ReduceOp.AVG, ReduceOp.PREMUL_SUM}
        yield from ((dtype, 101, op, False) for op in sorted(whole))


def red_op(op: ReduceOp) -> dist.ReduceOp:
    return getattr(dist.ReduceOp, op.name)


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Equal in every bit, except that one NaN is like another: arithmetic does not define them."""
    if left.is_floating_point():
        places = left.isnan()
        if not torch.equal(places, right.isnan()):
            return False
        left, right = left.masked_fill(places, 0.0), right.masked_fill(places, 0.0)
    return torch.equal(left.reshape(-1).view(torch.uint8), right.reshape(-1).view(torch.uint8))


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_reductions_are_those_of_gloo(size: int) -> None:
    cases = list(reductions())

    def work(rank: int) -> list[torch.Tensor]:
        found = []
        for dtype, elements, op, wild in cases:
            tensor = values(rank, elements, dtype, wild=wild).clone()
            dist.all_reduce(tensor, red_op(op))
            found.append(tensor)
        return found

    real = on_gloo(size, work)[size - 1]
    for (dtype, elements, op, wild), expected in zip(cases, real, strict=True):
        inputs = [[values(rank, elements, dtype, wild=wild)] for rank in range(size)]
        got = perform(Call.ALL_REDUCE, inputs, inputs, reduce_op=op)[size - 1][0]
        assert same_bits(got, expected), (dtype, elements, op, wild)


@pytest.mark.parametrize("size", [3, 4])
def test_other_reducing_calls_are_those_of_gloo(size: int) -> None:
    dtype = "float32"
    uneven = [5 + place for place in range(size)]

    def work(rank: int) -> list[torch.Tensor]:
        found = []
        for elements in (size, 999 * size, 100_001 * size):
            whole = values(rank, elements, dtype)
            root = whole.clone()
            dist.reduce(root, dst=size - 1)
            part = torch.empty(elements // size)
            dist.reduce_scatter_tensor(part, whole.clone())
            parts = torch.empty(elements // size)
            dist.reduce_scatter(parts, [piece.clone() for piece in whole.chunk(size)])
            found += [root, part, parts]
        pieces = [values(rank, count, dtype).clone() for count in uneven]
        mine = torch.empty(uneven[rank])
        dist.reduce_scatter(mine, pieces)
        several = [values(rank, count, dtype).clone() for count in (3, 70_000, 11)]
        dist.all_reduce_coalesced(several)
        return [*found, mine, *several]

    real = on_gloo(size, work)
    for rank in range(size):
        expected = iter(real[rank])
        for elements in (size, 999 * size, 100_001 * size):
            wholes = [[values(one, elements, dtype)] for one in range(size)]
            reduced = perform(
                Call.REDUCE,
                wholes,
                [wholes[one] if one == size - 1 else [] for one in range(size)],
                root=size - 1,
            )
            root = next(expected)
            if rank == size - 1:
                assert same_bits(reduced[rank][0], root), elements
            part = [[torch.empty(elements // size)] for _ in range(size)]
            single = perform(Call.REDUCE_SCATTER_SINGLE, wholes, part)
            assert same_bits(single[rank][0], next(expected)), elements
            lists = [list(whole[0].chunk(size)) for whole in wholes]
            listed = perform(Call.REDUCE_SCATTER, lists, part)
            assert same_bits(listed[rank][0], next(expected)), elements
        lists = [[values(one, count, dtype) for count in uneven] for one in range(size)]
        parts = [[torch.empty(count)] for count in uneven]
        assert same_bits(perform(Call.REDUCE_SCATTER, lists, parts)[rank][0], next(expected))
        several = [[values(one, count, dtype) for count in (3, 70_000, 11)] for one in range(size)]
        for got in perform(Call.ALL_REDUCE, several, several)[rank]:
            assert same_bits(got, next(expected))


def test_elements_that_cannot_be_reduced_are_refused_by_name() -> None:
    ones = [[torch.ones(4).to(torch.float8_e4m3fn)] for _ in range(2)]
    with pytest.raises(UnsupportedOperationError, match=r"all_reduce .sum.*float8_e4m3fn"):
        perform(Call.ALL_REDUCE, ones, ones, dtype=DType.FLOAT8_E4M3FN)


def test_threads_files_and_memory_that_are_used_again_change_no_bit() -> None:
    size, elements = 4, 1_500_001  # more than is worth threads
    spec = spec_of(torch.zeros(elements))
    op = op_of(Call.ALL_REDUCE, size, 0, [spec], [spec])
    alone, beside = Executor(Place()), Executor(Place(), files=Files(Place()), threads=3)

    def reduced(executor: Executor, tensors: list[torch.Tensor]) -> torch.Tensor:
        members = []
        for rank, tensor in enumerate(tensors):
            writer = ParcelWriter(Place())
            writer.put_tensor(tensor)
            # Half of the members come from elsewhere, half are in this process already.
            parcel = writer.finish() if rank % 2 else Parcel.holding([tensor])
            members.append(Request(rank, 0, op, parcel, Instance(0, ())))
        parcel, spans = executor.perform(members)[0]
        return parcel.part(spans[0].offset if spans[0] else 0, (elements,), torch.float32)

    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        given = [torch.randn(elements, generator=generator) for _ in range(size)]
        before = [tensor.clone() for tensor in given]
        assert torch.equal(reduced(beside, given), reduced(alone, given))
        assert all(map(torch.equal, given, before))
    beside.close()
