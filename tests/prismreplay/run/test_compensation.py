"""A reduced ring with the assistant's contribution gives what the full ring gave, up to rounding."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="needs torch")

from prismreplay.collect.gloo_order import reduce_in_order  # noqa: E402
from prismreplay.run.compensation import contribution, difference, finished  # noqa: E402
from prismtrace.schema import ReduceOp  # noqa: E402


def ring(members, op, factor=None):
    flat = [member.reshape(-1) for member in members]
    parts = reduce_in_order(
        lambda member, start, stop: flat[member][start:stop].clone(),
        flat[0].numel(),
        flat[0].element_size(),
        len(flat),
        op,
        factor,
    )
    return torch.cat(list(parts)).view(members[0].shape)


def inputs(size, elements, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point:
        return [torch.randn(elements, generator=generator).to(dtype) for _ in range(size)]
    return [torch.randint(-50, 50, (elements,), generator=generator).to(dtype) for _ in range(size)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("sandbox", [[0], [7], [2, 5], [0, 1, 2, 3]], ids=str)
@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.AVG])
def test_sums_up_to_rounding(dtype, sandbox, op):
    members = inputs(8, 20_000, dtype)
    full = ring(members, op)
    live = [members[rank] for rank in sandbox]
    made = contribution(full, live, op, group_size=8)
    total = finished(ring([*live, made], ReduceOp.SUM), op, 8)
    assert (total - full).abs().max() <= 64 * torch.finfo(dtype).eps


@pytest.mark.parametrize(
    "op", [ReduceOp.MAX, ReduceOp.MIN, ReduceOp.SUM, ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR]
)
def test_whole_numbers_are_exact(op):
    members = inputs(5, 300, torch.int64, seed=1)
    full = ring(members, op)
    made = contribution(full, members[:2], op, group_size=5)
    assert torch.equal(ring([*members[:2], made], op), full)


def test_products():
    members = [one.abs() + 0.5 for one in inputs(5, 300, torch.float32, seed=3)]
    members[1][7] = 0
    full = ring(members, ReduceOp.PRODUCT)
    made = contribution(full, members[:2], ReduceOp.PRODUCT, group_size=5)
    assert torch.allclose(ring([*members[:2], made], ReduceOp.PRODUCT), full)


def test_premultiplied_sums():
    members = inputs(5, 300, torch.float32, seed=2)
    full = ring(members, ReduceOp.PREMUL_SUM, 0.25)
    made = contribution(full, members[:1], ReduceOp.PREMUL_SUM, group_size=5, factor=0.25)
    assert torch.allclose(ring([members[0] * 0.25, made], ReduceOp.SUM), full, atol=1e-6)


def test_wrong_shapes_are_refused():
    with pytest.raises(ValueError, match="differ in shape"):
        contribution(torch.zeros(3), [torch.zeros(4)], ReduceOp.SUM, group_size=2)


@pytest.mark.parametrize(
    ("found", "exact", "steps"),
    [
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0]), 0),
        (torch.tensor([1 + 2**-23, 0.5]), torch.tensor([1.0, 0.5]), 1),
        (torch.tensor([3, -5]), torch.tensor([3, -3]), 2),
        (torch.tensor([1 + 1j]), torch.tensor([1 + 1j]), 0),
        (torch.empty(0), torch.empty(0), 0),
        (torch.tensor([2.0**-23]), torch.zeros(1), 1),
    ],
)
def test_differences(found, exact, steps):
    assert difference(found, exact) == steps
