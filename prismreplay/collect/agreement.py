"""What members of one communication must have alike, and how it is told that they do not.

No torch and no input or output in here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from prismreplay.errors import MismatchError
from prismreplay.runtime.operations import Call, Op, TensorSpec
from prismtrace.ranks import format_ranks, name_ranks
from prismtrace.schema import DType

if TYPE_CHECKING:
    from prismreplay.collect.matching import Request

__all__ = [
    "Form",
    "at_site",
    "differ",
    "form_of",
    "mismatch_of",
    "require_fit_in_pairs",
    "require_message_fits",
    "require_same_form",
]

_REDUCING = (
    Call.ALL_REDUCE,
    Call.REDUCE,
    Call.REDUCE_SCATTER,
    Call.REDUCE_SCATTER_SINGLE,
)
_ROOTED = (Call.BROADCAST, Call.REDUCE, Call.GATHER, Call.SCATTER)


def differ(one: Op, other: Op) -> bool:
    """Whether these cannot be members of one collective, whatever else is in it."""
    return any(of(one) != of(other) for _, of in _AGREE)


def mismatch_of(requests: Sequence[Request]) -> MismatchError:
    """What members of a collective that differ have first that is not alike, and who has what."""
    for what, of in _AGREE:
        parties: dict[Any, list[Request]] = defaultdict(list)
        for request in requests:
            parties[of(request.op)].append(request)
        if len(parties) > 1:
            return _mismatch(
                what,
                requests[0].op,
                *((sorted(one.rank for one in alike), value, alike[0].op.site)
                  for value, alike in parties.items()),
                steps=[request.op.step for request in requests],
            )  # fmt: skip
    raise ValueError("they are alike")


class Form(NamedTuple):
    """What all members of a collective have alike, in the order of `_AGREE`, and who said so."""

    alike: tuple[object, ...]
    site: str


def form_of(op: Op) -> Form:
    """What other members of this collective must have, too, also where they are made to differ.

    Not so sizes that depend on what a rank was given: of lists that may be uneven, and of
    objects, which travel as bytes.
    """
    uneven = op.call is Call.REDUCE_SCATTER or DType.UINT8 in (op.dtype, *_dtypes(op))
    alike = tuple(None if uneven and of is _sizes else of(op) for _, of in _AGREE)
    return Form(alike, op.site)


def require_same_form(rank: int, op: Op, other: int, form: Form) -> None:
    """Two members of a collective that are answered one by one make the same one.

    Args:
        rank: who made `op`.
        op: a collective.
        other: another member.
        form: what it made, see `form_of`.

    Raises:
        MismatchError: they differ.
    """
    mine = form_of(op)
    for (what, _), ours, others in zip(_AGREE, mine.alike, form.alike, strict=True):
        if ours != others:
            raise _mismatch(what, op, ([rank], ours, op.site), ([other], others, form.site))


def _root(op: Op) -> int | None:
    return op.root if op.call in _ROOTED else None


def _reduction(op: Op) -> str | None:
    if op.call not in _REDUCING or op.reduce_op is None:
        return None
    factor = "" if op.premul_factor is None else f" by {op.premul_factor}"
    return f"{op.reduce_op.value}{factor}"


def _sizes(op: Op) -> tuple[int, ...] | None:
    """Numbers of elements of the tensors that all members have alike."""
    alike = {
        Call.ALL_REDUCE: op.inputs,
        Call.BROADCAST: op.outputs,
        Call.REDUCE: op.inputs,
        Call.ALL_GATHER_SINGLE: op.inputs,
        Call.REDUCE_SCATTER: op.inputs,
        Call.REDUCE_SCATTER_SINGLE: op.inputs,
        Call.GATHER: op.inputs,
        Call.SCATTER: op.outputs,
    }.get(op.call)
    return None if alike is None else tuple(spec.elements for spec in alike)


def _dtypes(op: Op) -> set[DType]:
    return {spec.dtype for spec in (*op.inputs, *op.outputs)}


def _types(op: Op) -> tuple[str, ...] | None:
    if op.call in (Call.ALL_TO_ALL, Call.ALL_TO_ALL_SINGLE, Call.ALL_GATHER):
        specs: tuple[TensorSpec, ...] = (*op.inputs[:1], *op.outputs[:1])
        return tuple(sorted({spec.dtype.value for spec in specs}))
    alike = op.outputs if op.call in (Call.BROADCAST, Call.SCATTER) else op.inputs
    return tuple(spec.dtype.value for spec in alike)


_AGREE = (
    ("operation", lambda op: op.call.value),
    ("root", _root),
    ("reduction", _reduction),
    ("number of elements", _sizes),
    ("element type", _types),
)


def _check_gathered(giver: Request, taker: Request) -> None:
    """all_gather: what one rank gives must fit the place that the other has for it."""
    place = giver.op.group.ranks.index(giver.rank)
    size = giver.op.group.size
    given = [spec.elements for spec in giver.op.inputs]
    room = [spec.elements for spec in taker.op.outputs[place::size]]
    if given != room:
        raise _between("number of elements", giver, taker, tuple(given), tuple(room))


def _check_exchanged(giver: Request, taker: Request) -> None:
    """all_to_all: what one rank sends to the other must be what the other expects."""
    ranks = giver.op.group.ranks
    sent = _elements_for(giver.op.inputs, giver.op.input_splits, ranks, taker.rank)
    expected = _elements_for(taker.op.outputs, taker.op.output_splits, ranks, giver.rank)
    if sent != expected:
        raise _between("elements sent and expected", giver, taker, sent, expected)


def _elements_for(
    specs: tuple[TensorSpec, ...], splits: tuple[int, ...], ranks: tuple[int, ...], rank: int
) -> int:
    place = ranks.index(rank)
    if len(specs) > 1 or len(ranks) == 1:
        return specs[place].elements
    if not splits:
        return specs[0].elements // len(ranks)
    rows = specs[0].shape[0] if specs[0].shape else 1
    return specs[0].elements // rows * splits[place] if rows else 0


_PAIRWISE = {
    Call.ALL_GATHER: _check_gathered,
    Call.ALL_TO_ALL: _check_exchanged,
    Call.ALL_TO_ALL_SINGLE: _check_exchanged,
}


def require_fit_in_pairs(new: Request, there: Iterable[Request]) -> None:
    """Refuse a member if what it gives to another, or gets from it, is not what that one has.

    Raises:
        MismatchError: sizes differ.
    """
    check = _PAIRWISE.get(new.op.call)
    if check is None:
        return
    for other in there:
        for giver, taker in ((new, other), (other, new)):
            check(giver, taker)


def require_message_fits(send: Request, receive: Request) -> None:
    """Refuse a receive that has no room for what is sent.

    Raises:
        MismatchError: number or type of the elements differ.
    """
    sent, room = send.op.inputs[0], receive.op.outputs[0]
    if sent.dtype is not room.dtype:
        raise _between("element type", receive, send, room.dtype.value, sent.dtype.value)
    if sent.elements != room.elements:
        raise _between("number of elements", receive, send, room.elements, sent.elements)


def _mismatch(
    what: str,
    op: Op,
    *parties: tuple[Sequence[int], object, str],
    steps: Iterable[int | None] = (),
) -> MismatchError:
    """Ranks, with what they say and their line; those that are fewest first."""
    ordered = sorted(parties, key=lambda party: len(party[0]))
    name = f"group {op.group.called}"
    number = "" if op.seq is None else f", operation {op.count}"
    known = {step for step in steps if step is not None}
    step = f", step{'s' if len(known) > 1 else ''} {format_ranks(sorted(known))}" if known else ""
    call = "" if what == "operation" else f" of {op.call.value}"
    said = "; ".join(
        f"{_text(value)} on {name_ranks(ranks)}{at_site(site)}" for ranks, value, site in ordered
    )
    return MismatchError(
        f"{_all_of([ranks for ranks, _, _ in ordered])} disagree on the {what}{call}: {said}",
        where=f"{name}{number}{step}",
        hint="all members of a group must make the same communications in the same order; of one "
        "that a rank leaves out, its next one is what meets the others'",
    )


def _all_of(parties: Sequence[Sequence[int]]) -> str:
    """`ranks 3 and 2`, `rank 3 and ranks 0-2`."""
    if all(len(ranks) == 1 for ranks in parties):
        *first, last = (str(ranks[0]) for ranks in parties)
        return f"ranks {', '.join(first)} and {last}"
    *first, last = map(name_ranks, parties)
    return f"{', '.join(first)} and {last}"


def _between(what: str, new: Request, old: Request, mine: object, others: object) -> MismatchError:
    return _mismatch(
        what,
        new.op,
        ([new.rank], mine, new.op.site),
        ([old.rank], others, old.op.site),
        steps=(new.op.step, old.op.step),
    )


def at_site(site: str) -> str:
    """` at train.py:41 in train`, or nothing."""
    return f" at {site}" if site else ""


def _text(value: object) -> str:
    if isinstance(value, tuple):
        if len(value) == 1:
            return str(value[0])
        shown = ", ".join(map(str, value[:8]))
        return f"[{shown}{', ...' if len(value) > 8 else ''}]"
    return "none" if value is None else str(value)
