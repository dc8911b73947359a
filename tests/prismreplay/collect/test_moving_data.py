"""Communications that only move data, against what they are defined to do."""

from __future__ import annotations

import pytest
import torch

from prismreplay.collect.handover import Place
from prismreplay.runtime.operations import Call
from prismtrace.schema import ReduceOp
from tests.prismreplay.collect.members import perform

SIZE = 3
BIG = 2_000  # more than fits into a message


def inputs(count: int = 1, rows: int = 6, width: int = BIG) -> list[list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        [torch.randn(rows, width, generator=generator) for _ in range(count)] for _ in range(SIZE)
    ]


def check(got: list[list[torch.Tensor]], expected: list[list[torch.Tensor]]) -> None:
    for mine, wanted in zip(got, expected, strict=True):
        assert len(mine) == len(wanted)
        for left, right in zip(mine, wanted, strict=True):
            assert torch.equal(left, right)


@pytest.mark.parametrize("width", [1, BIG])
def test_broadcast(width: int) -> None:
    given = inputs(2, width=width)
    only_root = [given[1] if rank == 1 else [] for rank in range(SIZE)]
    check(perform(Call.BROADCAST, only_root, given, root=1), [given[1]] * SIZE)


def test_all_gather() -> None:
    given = inputs(2)
    every = [given[rank][which] for which in range(2) for rank in range(SIZE)]
    check(perform(Call.ALL_GATHER, given, [every] * SIZE), [every] * SIZE)


def test_all_gather_of_uneven_tensors() -> None:
    given = [[torch.randn(rank + 1, 3)] for rank in range(SIZE)]
    every = [one[0] for one in given]
    check(perform(Call.ALL_GATHER, given, [every] * SIZE), [every] * SIZE)


def test_all_gather_single() -> None:
    given = inputs(2)
    joined = [torch.cat([given[rank][which] for rank in range(SIZE)]) for which in range(2)]
    check(perform(Call.ALL_GATHER_SINGLE, given, [joined] * SIZE), [joined] * SIZE)


def test_gather_and_scatter() -> None:
    given = inputs()
    every = [one[0] for one in given]
    at_root = [every if rank == 2 else [] for rank in range(SIZE)]
    check(perform(Call.GATHER, given, at_root, root=2), at_root)
    check(perform(Call.SCATTER, at_root, given, root=2), given)


def test_all_to_all() -> None:
    given = [[torch.full((sender + taker,), sender) for taker in range(SIZE)]
             for sender in range(SIZE)]  # fmt: skip
    expected = [[given[sender][taker] for sender in range(SIZE)] for taker in range(SIZE)]
    check(perform(Call.ALL_TO_ALL, given, expected), expected)


def test_all_to_all_single() -> None:
    given = inputs()
    expected = [
        [torch.cat([given[sender][0].chunk(SIZE)[taker] for sender in range(SIZE)])]
        for taker in range(SIZE)
    ]
    check(perform(Call.ALL_TO_ALL_SINGLE, given, expected), expected)


def test_all_to_all_single_with_splits() -> None:
    rows = [[0, 2, 1], [3, 0, 0], [1, 1, 5]]  # by sender, by receiver
    given = [[torch.randn(sum(one), BIG)] for one in rows]
    expected = [
        [torch.cat([given[sender][0].split(rows[sender])[taker] for sender in range(SIZE)])]
        for taker in range(SIZE)
    ]
    each = [
        {
            "input_splits": tuple(rows[rank]),
            "output_splits": tuple(rows[sender][rank] for sender in range(SIZE)),
        }
        for rank in range(SIZE)
    ]
    check(perform(Call.ALL_TO_ALL_SINGLE, given, expected, each=each), expected)


def test_tensors_without_elements() -> None:
    empty = [[torch.empty(0, 3)]] * SIZE
    check(perform(Call.ALL_REDUCE, empty, empty), empty)
    check(perform(Call.ALL_GATHER_SINGLE, empty, empty), empty)
    check(perform(Call.ALL_TO_ALL_SINGLE, empty, empty), empty)


def test_barrier() -> None:
    nothing: list[list[torch.Tensor]] = [[] for _ in range(SIZE)]
    check(perform(Call.BARRIER, nothing, nothing), nothing)


def test_a_sum_of_scaled_values_scales_first() -> None:
    given = [[torch.full((5,), float(rank + 1), dtype=torch.bfloat16)] for rank in range(SIZE)]
    got = perform(Call.ALL_REDUCE, given, given, reduce_op=ReduceOp.PREMUL_SUM, premul_factor=0.5)
    check(got, [[torch.full((5,), 3.0, dtype=torch.bfloat16)]] * SIZE)


def test_whole_numbers_are_averaged_towards_zero() -> None:
    given = [[torch.tensor([-4, 5])], [torch.tensor([0, 0])], [torch.tensor([0, 0])]]
    got = perform(Call.ALL_REDUCE, given, given, reduce_op=ReduceOp.AVG)
    check(got, [[torch.tensor([-1, 1])]] * SIZE)


def test_mixed_element_types_are_reduced_apart() -> None:
    given = [[torch.ones(3), torch.ones(2, dtype=torch.int32)] for _ in range(SIZE)]
    expected = [[torch.full((3,), 3.0), torch.full((2,), 3, dtype=torch.int32)]] * SIZE
    check(perform(Call.ALL_REDUCE, given, given), expected)


def test_results_may_be_kept_in_a_folder(tmp_path) -> None:
    given = inputs()
    check(
        perform(Call.ALL_REDUCE, given, given, place=Place(tmp_path)),
        perform(Call.ALL_REDUCE, given, given),
    )
