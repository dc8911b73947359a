"""Made-up operation-level logs whose true timing is known: a small pipeline, simulated.

All times are multiples of 0.1 ms, far above the converter's tolerance, so that what was done
before what is never in doubt.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import polars as pl

TICK_NS = 100_000


@dataclass
class Log:
    """Rows as a log has them, and the step times in ticks with and without launch delays."""

    rows: list[dict[str, object]] = field(default_factory=list)
    base: list[int] = field(default_factory=list)

    @property
    def table(self) -> pl.DataFrame:
        """The default columns; times in seconds."""
        types = dict.fromkeys(("dp_rank", "stage", "rank", "step", "mb_id", "mc"), pl.Int64)
        return pl.DataFrame(self.rows, schema_overrides=types)


@dataclass
class _Operation:
    key: tuple[object, ...]
    row: dict[str, object]
    duration: int
    deps: list[tuple[object, ...]]
    delay: int
    partners: tuple[object, ...] | None


def _orders(stage: int, pp: int, microbatches: int, chunks: int) -> list[tuple[str, int, int]]:
    """(phase, microbatch, chunk) of the computations of a stage, in order."""
    if chunks > 1:  # all forwards, then all backwards
        work = [(m, c) for c in range(chunks) for m in range(microbatches)]
        return [("forward", *w) for w in work] + [("backward", *w) for w in reversed(work)]
    warm_up = min(microbatches, pp - stage - 1)
    order = [("forward", m, 0) for m in range(warm_up)]
    for m in range(microbatches - warm_up):
        order += [("forward", warm_up + m, 0), ("backward", m, 0)]
    return order + [("backward", m, 0) for m in range(microbatches - warm_up, microbatches)]


def simulate(
    *,
    pp: int = 2,
    dp: int = 2,
    microbatches: int = 3,
    chunks: int = 1,
    steps: int = 2,
    seed: int = 0,
    delays: bool = False,
    rank_stride: int = 1,
    work: dict[tuple[int, int], int] | None = None,
) -> Log:
    """A log of some steps; `work` sets the ticks of a forward by (replica, stage)."""
    draw = random.Random(seed)
    log = Log()
    for number in range(steps):
        step = 10 * number + 3
        operations: dict[tuple[object, ...], _Operation] = {}
        for replica in range(dp):
            for stage in range(pp):
                fixed = (work or {}).get((replica, stage))
                place = {
                    "dp_rank": replica,
                    "stage": stage,
                    "rank": rank_stride * (stage * dp + replica),
                    "step": step,
                }
                _add_rank(operations, place, (pp, microbatches, chunks), draw, fixed, delays=delays)
        log.base.append(_run(operations, log))
    return log


def _add_rank(
    operations: dict[tuple[object, ...], _Operation],
    place: dict[str, object],
    shape: tuple[int, int, int],
    draw: random.Random,
    fixed: int | None,
    *,
    delays: bool,
) -> None:
    pp, microbatches, chunks = shape
    stage, replica, rank = place["stage"], place["dp_rank"], place["rank"]
    last_of: dict[str, tuple[object, ...]] = {}

    def add(name, chain, duration, *, deps=(), partners=None, microbatch=-1, chunk=-1):
        key = (rank, name, microbatch, chunk)
        before = [last_of[chain]] if chain in last_of else []
        operations[key] = _Operation(
            key,
            {**place, "optype": name, "mb_id": microbatch, "mc": chunk},
            duration,
            [*before, *deps],
            draw.choice([0, 0, 1, 3]) if delays else 0,
            partners,
        )
        last_of[chain] = key
        return key

    gathers = [
        add("params-all-gather", "comm", draw.randint(1, 4), partners=("pg", stage, c), chunk=c)
        for c in range(chunks)
    ]
    first_of_chunk: set[int] = set()
    for phase, m, c in _orders(stage, pp, microbatches, chunks):
        begins = (stage, c) == ((0, 0) if phase == "forward" else (pp - 1, chunks - 1))
        ends = (stage, c) == ((pp - 1, chunks - 1) if phase == "forward" else (0, 0))
        direction = 1 if phase == "forward" else -1
        place_in_line = c * pp + stage
        deps = []
        if not begins:
            link = (phase, replica, place_in_line - direction, m)
            deps = [
                (rank, f"{phase}-recv", m, c),
            ]
            receive = add(
                f"{phase}-recv", f"{phase}-recv", draw.randint(1, 3), partners=link,
                microbatch=m, chunk=c,
            )  # fmt: skip
            deps = [receive]
        if phase == "forward" and c not in first_of_chunk:
            first_of_chunk.add(c)
            deps.append(gathers[c])
        duration = fixed or draw.randint(5, 12)
        if phase == "backward":
            duration *= 2
        done = add(f"{phase}-compute", "compute", duration, deps=deps, microbatch=m, chunk=c)
        if not ends:
            add(
                f"{phase}-send", f"{phase}-send", draw.randint(1, 3), deps=[done],
                partners=(phase, replica, place_in_line, m), microbatch=m, chunk=c,
            )  # fmt: skip
    computed = last_of["compute"]
    add("layernorm-grads-all-reduce", "comm", 1, deps=[computed])
    if stage in (0, pp - 1):
        add(
            "embedding-grads-all-reduce", "comm", draw.randint(1, 9), deps=[computed],
            partners=("embedding", replica),
        )  # fmt: skip
    for c in range(chunks):
        add(
            "grads-reduce-scatter", "comm", draw.randint(1, 9), deps=[computed],
            partners=("rs", stage, c), chunk=c,
        )  # fmt: skip
    clipped = add("optimizer-clip-main-grad", "comm", 2, deps=[computed], partners=("clip",))
    add("optimizer", "compute", draw.randint(1, 4), deps=[clipped])


def _run(operations: dict[tuple[object, ...], _Operation], log: Log) -> int:
    """Earliest times by relaxation; all partners wait for the last of them."""
    teams: dict[object, list[_Operation]] = {}
    for operation in operations.values():
        if operation.partners is not None:
            teams.setdefault(operation.partners, []).append(operation)
    start: dict[object, int] = {}
    end: dict[object, int] = {}
    while len(end) < len(operations):
        before = len(end)
        for key, operation in operations.items():
            if key not in start and all(dep in end for dep in operation.deps):
                start[key] = max((end[dep] for dep in operation.deps), default=0) + operation.delay
            team = teams.get(operation.partners, [operation])
            if key not in end and all(member.key in start for member in team):
                end[key] = max(start[member.key] for member in team) + operation.duration
        assert len(end) > before, "the made-up schedule deadlocks"
    for key, operation in operations.items():
        log.rows.append(
            {
                **operation.row,
                "start_ts": start[key] * TICK_NS / 1e9,
                "duration": (end[key] - start[key]) * TICK_NS / 1e9,
            }
        )
    return max(end.values())
