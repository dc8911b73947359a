"""What ranks ask the coordinator, and what it sends them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from prismreplay.collect.deadlock import Blocked
from prismreplay.collect.key_value import awaited_keys
from prismreplay.collect.matching import Request
from prismreplay.collect.messages import Message

__all__ = ["Question", "Sent", "as_blocked"]


class Sent(NamedTuple):
    """A message to a rank, and the bytes that go with it."""

    rank: int
    message: Message
    parcel: Any = None


@dataclass(slots=True, eq=False)
class Question:
    """Something that a rank waits to be told."""

    rank: int
    number: int
    helpers: int
    request: Request | None = None
    store: tuple[str, tuple[Any, ...]] | None = None
    site: str = ""


def as_blocked(question: Question) -> Blocked:
    """The question, for messages about who waits for whom."""
    request = question.request
    if request is None:
        op, args = question.store or ("", ())
        return Blocked(question.rank, site=question.site, store=op, keys=tuple(awaited_keys(args)))
    return Blocked(
        question.rank,
        site=question.site,
        op=request.op,
        missing=tuple(request.instance.missing),
    )
