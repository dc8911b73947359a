"""Mixture of experts with a given share of tokens an expert, without touching the program.

    import prismreplay.mock_router
    prismreplay.mock_router.install(shares=[0.4, 0.2, 0.2, 0.2])       # of all copies of tokens
    prismreplay.mock_router.install(imbalance=(0.5, 2.0))              # of the mean, min and max

or ``prismreplay collect --mock-router shares.toml``. The logits of each router that the program
makes from then on are replaced, so the program itself dispatches the tokens that way. The choice
depends on the number of tokens only: ranks with equally many send equally many to every expert.
Values are exact, gradients flow to the real gate as if it had made them.

A router is a `torch.nn.Linear` that a module calls ``gate`` or ``router``, or a module with a
method `gating` (Megatron-core's TopKRouter). Importing this imports no torch.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from prismreplay.errors import MockRouterError
from prismtrace.errors import InputFileError
from prismtrace.input_files import read_text

__all__ = ["MockRouter", "Routing", "choose_experts", "expert_counts", "install", "read_routing"]

Tensor = Any
"""A torch.Tensor; torch carries no types that a strict checker accepts."""

_TOP_K_NAMES = ("top_k", "topk", "num_experts_per_tok", "k")
_CHOSEN, _LESS, _OTHERS = 4.0, 0.125, -4.0
_Share = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Routing(BaseModel):
    """How routers choose. One of `shares` and `imbalance` is given."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    shares: tuple[_Share, ...] = ()
    """Part of all copies of tokens that each expert gets; they are scaled to a sum of 1."""
    imbalance: tuple[_Share, _Share] | None = None
    """Least and largest load of an expert, in units of the mean: the first expert gets the most,
    the last the least, the others equal parts of the rest."""
    top_k: Annotated[int, Field(ge=1)] | None = None
    """Experts a token goes to, where the module that holds the router does not say."""
    modules: tuple[str, ...] = ("gate", "router")
    """Patterns for the names that modules give their routers."""
    rotate: int = 0
    """How many experts further the shares begin in each next router of the program."""
    seed: int = 0
    """Which tokens go to which expert depends on it."""

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        if bool(self.shares) == (self.imbalance is not None):
            raise ValueError("needs shares or imbalance, and not both")
        if self.shares and not sum(self.shares) > 0:
            raise ValueError("shares are all zero")
        if self.imbalance and not self.imbalance[0] <= 1 <= self.imbalance[1]:
            raise ValueError("imbalance needs the least load, up to 1, then the largest, from 1 on")
        return self

    def shares_of(self, experts: int) -> list[float]:
        """The share of each of so many experts; their sum is 1.

        Raises:
            MockRouterError: the routing is for another number, or impossible for this one.
        """
        if self.shares:
            if len(self.shares) != experts:
                raise MockRouterError(
                    f"shares are for {len(self.shares)} experts, and a router has {experts}",
                    hint="give one share an expert, or imbalance = [min, max]",
                )
            total = sum(self.shares)
            return [share / total for share in self.shares]
        least, most = self.imbalance or (1.0, 1.0)
        others = (experts - least - most) / (experts - 2) if experts > 2 else 1.0
        possible = least <= others <= most if experts > 2 else least + most == experts
        if not possible:
            raise MockRouterError(
                f"{experts} experts cannot have a least load of {least} and a largest of {most} "
                "times the mean",
                hint="the loads of the others make up for both: their mean is 1",
            )
        loads = [most, *[others] * (experts - 2), least][:experts]
        return [load / experts for load in loads]


def read_routing(path: str | os.PathLike[str]) -> Routing:
    """The routing in a TOML file with the fields of `Routing`.

    Raises:
        MockRouterError: no such file, not TOML, or not a routing.
    """
    where = os.fspath(path)
    try:
        return Routing.model_validate(tomllib.loads(read_text(path)))
    except InputFileError as error:
        raise MockRouterError(error.message, where=where) from error
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise MockRouterError(
            first["msg"].removeprefix("Value error, ") + (f" at {place}" if place else ""),
            where=where,
            hint="for example: imbalance = [0.5, 2.0]",
        ) from error
    except ValueError as error:
        raise MockRouterError(f"not TOML: {error}", where=where) from error


def expert_counts(tokens: int, top_k: int, shares: Sequence[float]) -> list[int]:
    """How many of `tokens` each expert gets; off by less than one from its share of the copies.

    Args:
        tokens: rows that a router sees.
        top_k: experts a token goes to; the sum of the counts is `tokens` times that.
        shares: of each expert; their sum is 1.

    Raises:
        MockRouterError: an expert would get a token twice.
    """
    copies = tokens * top_k
    if max(shares) * top_k > 1 + 1e-9:
        raise MockRouterError(
            f"a share of {max(shares):.3g} is more than one expert can have: with top-{top_k} a "
            f"token goes to {top_k} different experts, so {1 / top_k:.3g} is the most"
        )
    exact = [min(copies * share, tokens) for share in shares]
    counts = [int(value) for value in exact]
    # The largest remainders get what is left; equal ones in the order of the experts.
    order = sorted(range(len(shares)), key=lambda expert: (counts[expert] - exact[expert], expert))
    for expert in [e for e in order if counts[e] < tokens][: copies - sum(counts)]:
        counts[expert] += 1
    return counts


def choose_experts(tokens: int, top_k: int, shares: Sequence[float], seed: int = 0) -> Tensor:
    """The experts of each token, int64[tokens, top_k]: different ones, best first.

    Raises:
        MockRouterError: see `expert_counts`.
    """
    import torch

    counts = torch.tensor(expert_counts(tokens, top_k, shares))
    # Expert by expert along a line that is wound around the tokens: no expert has more copies
    # than there are tokens, so none meets a token twice.
    line = torch.arange(len(counts)).repeat_interleave(counts)
    chosen = line.view(top_k, tokens).T
    order = torch.randperm(tokens, generator=torch.Generator().manual_seed(seed))
    return chosen[order]


@dataclass
class MockRouter:
    """Replaces the logits of a program's routers."""

    routing: Routing
    patched: list[str] = field(default_factory=list)
    """Names of the routers found so far, as their modules call them."""
    _logits: dict[tuple[Any, ...], Tensor] = field(default_factory=dict)
    _remove: Callable[[], None] | None = None

    def remove(self) -> None:
        """Leave routers alone that are made from now on."""
        if self._remove is not None:
            self._remove()
            self._remove = None

    def found(self, parent: Any, name: str, module: Any) -> None:
        """A module was made part of another; patch it if it is a router."""
        import torch

        if not any(fnmatchcase(name, pattern) for pattern in self.routing.modules):
            return
        number = len(self.patched)
        if callable(getattr(module, "gating", None)):
            own = module.gating
            module.gating = lambda *args, **kwargs: self.replaced(
                own(*args, **kwargs), number, (module, parent)
            )
        elif isinstance(module, torch.nn.Linear):
            module.register_forward_hook(
                lambda _module, _inputs, logits: self.replaced(logits, number, (parent,))
            )
        else:
            return
        self.patched.append(f"{type(parent).__name__}.{name}")

    def replaced(self, logits: Tensor, number: int, holders: Sequence[Any]) -> Tensor:
        """Logits (…, experts) of router `number` that choose as the routing says.

        Raises:
            MockRouterError: nothing says how many experts a token goes to, or see
                `Routing.shares_of`.
        """
        rows, experts = logits.shape[:-1].numel(), logits.shape[-1]
        if not rows:
            return logits
        top_k = self.routing.top_k or _top_k_of(holders)
        if top_k is None:
            raise MockRouterError(
                f"nothing says how many experts a token goes to in {self.patched[number]}",
                hint=f"set top_k; the module has none of {', '.join(_TOP_K_NAMES)}",
            )
        key = (number if self.routing.rotate else 0, rows, experts, top_k)
        wanted = self._logits.get(key)
        if wanted is None or wanted.dtype != logits.dtype or wanted.device != logits.device:
            wanted = self._logits[key] = self._made(logits, *key)
        # The value is that of `wanted` exactly; the gradient goes to the gate.
        result: Tensor = wanted.view_as(logits) + (logits - logits.detach())
        return result

    def _made(self, logits: Tensor, number: int, rows: int, experts: int, top_k: int) -> Tensor:
        shares = self.routing.shares_of(experts)
        shift = -number * self.routing.rotate % experts
        chosen = choose_experts(
            rows, top_k, [*shares[shift:], *shares[:shift]], self.routing.seed + number
        )
        values = logits.new_full((rows, experts), _OTHERS, requires_grad=False)
        for place in range(top_k):
            column = chosen[:, place : place + 1].to(logits.device)
            values.scatter_(1, column, _CHOSEN - _LESS * place)
        return values


def _top_k_of(holders: Sequence[Any]) -> int | None:
    for holder in holders:
        for name in _TOP_K_NAMES:
            value = getattr(holder, name, None)
            if isinstance(value, int) and not isinstance(value, bool):
                return value
    return None


def install(
    routing: Routing | None = None,
    *,
    shares: Sequence[float] = (),
    imbalance: tuple[float, float] | None = None,
    top_k: int | None = None,
) -> MockRouter:
    """Replace the logits of all routers that are made in this process from now on.

    Args:
        routing: how; or, in its place:
        shares: see `Routing`.
        imbalance: see `Routing`.
        top_k: see `Routing`.

    Raises:
        MockRouterError: neither or both of shares and imbalance, or impossible ones.
    """
    from torch.nn.modules.module import register_module_module_registration_hook

    if routing is None:
        try:
            routing = Routing(shares=tuple(shares), imbalance=imbalance, top_k=top_k)
        except ValidationError as error:
            message = error.errors()[0]["msg"].removeprefix("Value error, ")
            raise MockRouterError(message) from error
    router = MockRouter(routing)
    router._remove = register_module_module_registration_hook(router.found).remove  # noqa: SLF001
    return router
