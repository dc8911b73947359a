"""Changes of virtual ranks: a slow one, a faster kernel, said as on the command line."""

from __future__ import annotations

from collections.abc import Sequence

from prismcalib.edits import Edit, Scale, SetDuration
from prismreplay.errors import PlanError
from prismtrace.ranks import parse_ranks
from prismtrace.schema import Kind, Phase

__all__ = ["edits_of"]

_TEXTS = ("kind", "phase", "group_name")
_KNOWN = {"kind": tuple(Kind), "phase": tuple(Phase)}
_NUMBERS = ("step", "microbatch", "stream", "chunk")


def edits_of(
    texts: Sequence[str], sandbox: Sequence[int], world_size: int | None = None
) -> list[Edit]:
    """Edits such as ``rank=12,kind=compute,scale=1.4``.

    A text has `scale` (a factor) or `set` (a duration such as 3ms), and any of `rank` (12, or
    0-3), `kind`, `phase`, `name` (part of it), `group_name`, `step`, `microbatch`, `chunk`. What
    sandbox ranks do is left alone: they are real.

    Args:
        texts: what to change.
        sandbox: ranks that are real.
        world_size: of the job, where no trace will tell which ranks there are.

    Raises:
        PlanError: a text is none, or is about sandbox ranks or ranks beyond the world only.
    """
    edits = [_edit(text, frozenset(sandbox)) for text in texts]
    if world_size is not None:
        for text in texts:
            _require_ranks(text, world_size)
    return edits


def _require_ranks(text: str, world_size: int) -> None:
    for part in text.split(","):
        key, _, value = (word.strip() for word in part.partition("="))
        if key == "rank" and min(parse_ranks(value)) >= world_size:
            raise _wrong(text, f"the job has ranks 0-{world_size - 1}")


def _edit(text: str, sandbox: frozenset[int]) -> Edit:
    conditions: list[str] = []
    change: tuple[str, str] | None = None
    for part in text.split(","):
        key, equals, value = (word.strip() for word in part.partition("="))
        if not equals or not value:
            raise _wrong(text, f"{part!r} is no name=value")
        if key in ("scale", "set"):
            if change is not None:
                raise _wrong(text, "it changes the same twice")
            change = key, value
        else:
            conditions.append(_condition(text, key, value, sandbox))
    if change is None:
        raise _wrong(text, "it does not say what to change: scale=1.4 or set=3ms")
    if sandbox:
        conditions.append(f"rank NOT IN ({', '.join(map(str, sorted(sandbox)))})")
    where = " AND ".join(conditions) or "rank >= 0"
    if change[0] == "set":
        from prismcalib.durations import parse_ns

        try:
            return SetDuration(where, parse_ns(change[1]))
        except ValueError as error:
            raise _wrong(text, str(error)) from error
    try:
        factor = float(change[1])
    except ValueError as error:
        raise _wrong(text, f"scale={change[1]} is no number") from error
    if not 0 <= factor < float("inf"):
        raise _wrong(text, "a factor is a number from 0 on")
    return Scale(where, factor)


def _condition(text: str, key: str, value: str, sandbox: frozenset[int]) -> str:
    quoted = value.replace("'", "''")
    if key == "rank":
        try:
            ranks = parse_ranks(value)
        except ValueError as error:
            raise _wrong(text, str(error)) from error
        if sandbox.issuperset(ranks):
            raise PlanError(
                f"--inject {text}: sandbox ranks run for real",
                hint="change virtual ranks, or use --spin for named pieces of sandbox ranks",
            )
        return f"rank IN ({', '.join(map(str, ranks))})"
    if key == "name":
        return f"name LIKE '%{quoted}%'"
    if key in _KNOWN and value not in _KNOWN[key]:
        raise _wrong(text, f"{key} is one of {', '.join(_KNOWN[key])}")
    if key in _TEXTS:
        return f"{key} = '{quoted}'"
    if key in _NUMBERS and value.isdecimal():
        return f"{key} = {value}"
    raise _wrong(text, f"{key}={value} is not understood")


def _wrong(text: str, why: str) -> PlanError:
    return PlanError(
        f"--inject {text}: {why}", hint="for example: --inject rank=12,kind=compute,scale=1.4"
    )
