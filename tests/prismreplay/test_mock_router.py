from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="needs the extra `replay`")

from prismreplay.errors import MockRouterError  # noqa: E402
from prismreplay.mock_router import (  # noqa: E402
    Routing,
    choose_experts,
    expert_counts,
    install,
    read_routing,
)


@st.composite
def routings(draw):
    """Tokens, top-k and shares that no expert exceeds."""
    experts = draw(st.integers(1, 12))
    top_k = draw(st.integers(1, experts))
    raw = draw(st.lists(st.integers(0, 100), min_size=experts, max_size=experts))
    shares = [(value + 1) / (sum(raw) + experts) for value in raw]
    # Towards equal shares until none is more than one expert can have.
    over = max(shares) - 1 / experts
    room = 1 / top_k - 1 / experts
    factor = min(1.0, room / over) if over > 0 else 1.0
    shares = [1 / experts + (share - 1 / experts) * factor for share in shares]
    return draw(st.integers(0, 200)), top_k, shares


@given(routings())
def test_shares_are_met_within_rounding(case):
    tokens, top_k, shares = case
    counts = expert_counts(tokens, top_k, shares)
    assert sum(counts) == tokens * top_k
    assert all(
        abs(count - tokens * top_k * share) < 1 + 1e-6
        for count, share in zip(counts, shares, strict=True)
    )
    assert max(counts) <= tokens


@given(routings(), st.integers(0, 3))
def test_every_token_goes_to_different_experts(case, seed):
    tokens, top_k, shares = case
    chosen = choose_experts(tokens, top_k, shares, seed)
    assert chosen.shape == (tokens, top_k)
    assert all(len(set(row)) == top_k for row in chosen.tolist())
    assert torch.bincount(chosen.flatten(), minlength=len(shares)).tolist() == expert_counts(
        tokens, top_k, shares
    )


@given(st.integers(0, 300), st.integers(2, 4), st.integers(2, 4), st.integers(1, 2))
def test_what_ranks_send_is_what_ranks_expect(tokens, local, ranks, top_k):
    """Rows to each rank, as each rank's own router sends them, are what the rule `own` expects."""
    shares = Routing(imbalance=(0.5, 1.5)).shares_of(local * ranks)
    counts = [
        torch.bincount(
            choose_experts(tokens, top_k, shares, seed).flatten(), minlength=local * ranks
        )
        for seed in range(ranks)
    ]
    sent = torch.stack([row.view(ranks, local).sum(1) for row in counts])
    for receiver in range(ranks):
        # It takes its partners to send what it would send itself.
        assert sent[:, receiver].tolist() == [sent[receiver, receiver].item()] * ranks


class Block(torch.nn.Module):
    def __init__(self, experts=4, top_k=2):
        super().__init__()
        self.top_k = top_k
        self.gate = torch.nn.Linear(8, experts, bias=False)

    def forward(self, x):
        weight, chosen = self.gate(x).softmax(-1).topk(self.top_k)
        return weight, chosen


@pytest.fixture
def mocked():
    routers = []

    def mock(*args, **kwargs):
        routers.append(install(*args, **kwargs))
        return routers[-1]

    yield mock
    for router in routers:
        router.remove()


def test_routers_of_plain_modules_choose_as_told(mocked):
    router = mocked(shares=[4, 2, 1, 1])
    block = Block()
    weight, chosen = block(torch.randn(2, 20, 8))
    assert router.patched == ["Block.gate"]
    assert torch.bincount(chosen.flatten()).tolist() == [40, 20, 10, 10]
    weight.sum().backward()
    assert block.gate.weight.grad is not None
    router.remove()
    _, chosen = Block()(torch.randn(2, 20, 8))
    assert torch.bincount(chosen.flatten(), minlength=4).tolist() != [40, 20, 10, 10]


def test_routers_of_megatron_choose_as_told(mocked):
    class TopKRouter(torch.nn.Module):
        topk = 1

        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(4, 8))

        def gating(self, x):
            return x @ self.weight.T

        def forward(self, x):
            return torch.sigmoid(self.gating(x)).topk(self.topk).indices

    router = mocked(imbalance=(0.5, 2))
    layer = torch.nn.Module()
    layer.router = TopKRouter()
    chosen = layer.router(torch.randn(10, 4, 8))
    assert router.patched == ["Module.router"]
    assert torch.bincount(chosen.flatten()).tolist() == [20, 8, 7, 5]


def test_each_next_router_can_begin_elsewhere(mocked):
    mocked(Routing(shares=(0.5, 0.5, 0, 0), rotate=2))
    first, second = Block(), Block()
    x = torch.randn(10, 8)
    assert torch.bincount(first(x)[1].flatten(), minlength=4).tolist() == [10, 10, 0, 0]
    assert torch.bincount(second(x)[1].flatten(), minlength=4).tolist() == [0, 0, 10, 10]
    assert first(x[:0])[1].shape == (0, 2)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({}, "needs shares or imbalance"),
        ({"shares": [1], "imbalance": (0, 2)}, "not both"),
        ({"shares": [0, 0]}, "all zero"),
        ({"imbalance": (1.5, 2)}, "up to 1"),
    ],
)
def test_impossible_routings(how, message):
    with pytest.raises(MockRouterError, match=message):
        install(**how)


def test_what_does_not_fit_the_program(mocked):
    mocked(shares=[1, 1])
    with pytest.raises(MockRouterError, match="shares are for 2 experts, and a router has 4"):
        Block()(torch.randn(3, 8))


def test_more_than_an_expert_can_have(mocked):
    mocked(shares=[0.7, 0.1, 0.1, 0.1])
    with pytest.raises(MockRouterError, match="is more than one expert can have"):
        Block()(torch.randn(3, 8))


def test_nothing_says_top_k(mocked):
    mocked(imbalance=(0.5, 2))
    layer = torch.nn.Module()
    layer.gate = torch.nn.Linear(8, 4)
    with pytest.raises(MockRouterError, match=r"how many experts a token goes to in Module\.gate"):
        layer.gate(torch.randn(3, 8))


def test_files(tmp_path):
    path = tmp_path / "shares.toml"
    path.write_text("imbalance = [0.5, 2.0]\ntop_k = 2\n")
    assert read_routing(path) == Routing(imbalance=(0.5, 2.0), top_k=2)
    for text in ("imbalance = 3", "colour = 1", "shares = [", ""):
        path.write_text(text)
        with pytest.raises(MockRouterError):
            read_routing(path)
    with pytest.raises(MockRouterError, match="no such file"):
        read_routing(tmp_path / "absent.toml")
