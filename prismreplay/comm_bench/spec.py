"""What is measured: kinds of communication, payloads, and who takes part. No torch in here."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

from prismreplay.errors import CommBenchError
from prismtrace.schema import DType, Kind

__all__ = [
    "BACKENDS",
    "KINDS",
    "USUAL_KINDS",
    "BenchSpec",
    "Placement",
    "parse_sizes",
    "placements",
]

BACKENDS = ("gloo", "nccl")
USUAL_KINDS = (
    Kind.ALL_REDUCE,
    Kind.ALL_GATHER,
    Kind.REDUCE_SCATTER,
    Kind.BROADCAST,
    Kind.ALL_TO_ALL,
    Kind.SEND,
    Kind.BARRIER,
)
KINDS = (*USUAL_KINDS, Kind.REDUCE, Kind.GATHER, Kind.SCATTER)

_SIZE = re.compile(r"(\d+)\s*([KMG]?)(?:i?B)?", re.IGNORECASE)
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


@dataclass(frozen=True)
class BenchSpec:
    """What all ranks of a measurement have to know.

    Attributes:
        kinds: some of `KINDS`.
        sizes: payloads in bytes, as nccl-tests counts them.
        group_sizes: members of a group; empty: 2, 4, 8 and so on, and all ranks.
        dtype: of the elements.
        backend: one of `BACKENDS`.
        rounds: how often everything is measured, once around after the other. The median of a
            round is one sample.
        round_s: how long an operation is repeated in a round, in seconds.
        computing: each rank's program computes while an operation is under way; gloo only.
    """

    kinds: tuple[Kind, ...] = USUAL_KINDS
    sizes: tuple[int, ...] = (1 << 10, 1 << 15, 1 << 20)
    group_sizes: tuple[int, ...] = ()
    dtype: DType = DType.FLOAT32
    backend: str = "gloo"
    rounds: int = 5
    round_s: float = 0.05
    computing: bool = False

    def sizes_of(self, kind: Kind) -> tuple[int, ...]:
        """Payloads to measure of a kind: a barrier carries nothing."""
        return (0,) if kind is Kind.BARRIER else self.sizes

    def to_json(self) -> str:
        """For `of_json`, in another process."""
        return json.dumps(asdict(self))

    @classmethod
    def of_json(cls, text: str) -> BenchSpec:
        """Inverse of `to_json`."""
        values = json.loads(text)
        return cls(
            **{
                **values,
                "kinds": tuple(map(Kind, values["kinds"])),
                "sizes": tuple(values["sizes"]),
                "group_sizes": tuple(values["group_sizes"]),
                "dtype": DType(values["dtype"]),
            }
        )


def parse_sizes(text: str, factor: int = 4) -> tuple[int, ...]:
    """Payloads in bytes, ascending: ``1K-64M`` (each `factor` times the last), ``4K,1M``.

    K, M and G are powers of 1024.

    Raises:
        ValueError: it says something else.
    """
    sizes: set[int] = set()
    for part in text.split(","):
        ends = [_size(end) for end in part.split("-")]
        if len(ends) > 2 or ends[0] > ends[-1]:
            raise ValueError(f"{part.strip()!r} is no range of sizes such as 1K-64M")
        size = ends[0]
        while size < ends[-1]:
            sizes.add(size)
            size *= factor
        sizes.add(ends[-1])
    return tuple(sorted(sizes))


def _size(text: str) -> int:
    found = _SIZE.fullmatch(text.strip())
    if found is None or int(found[1]) == 0:
        raise ValueError(f"{text.strip()!r} is no size such as 4096, 1K or 64M")
    return int(found[1]) * _UNITS[found[2].upper()]


class Placement(NamedTuple):
    """Ranks that form a group, on so many hosts."""

    ranks: tuple[int, ...]
    hosts: int


def placements(hosts: Sequence[str], group_sizes: Sequence[int]) -> tuple[Placement, ...]:
    """Groups to measure, each with rank 0: of every size on as few hosts, and on as many, as may be.

    Args:
        hosts: where each rank is.
        group_sizes: members; empty: powers of two up to all ranks, and all ranks.

    Raises:
        CommBenchError: a group cannot have so many members.
    """
    world = len(hosts)
    wanted = sorted(set(group_sizes)) or [
        *(1 << power for power in range(1, world.bit_length()) if 1 << power < world),
        world,
    ]
    wrong = [size for size in wanted if not 2 <= size <= world]
    if wrong:
        raise CommBenchError(
            f"a group of {wrong[0]} cannot be made of {world} ranks",
            hint="start more ranks (--nproc 4), or ask for --group-sizes 2",
        )
    names = list(dict.fromkeys(hosts))
    inside = [hosts[:rank].count(host) for rank, host in enumerate(hosts)]
    packed = sorted(range(world), key=lambda rank: (names.index(hosts[rank]), rank))
    spread = sorted(range(world), key=lambda rank: (inside[rank], names.index(hosts[rank])))
    found: dict[tuple[int, int], Placement] = {}
    for size in wanted:
        for order in (packed, spread):
            ranks = tuple(sorted(order[:size]))
            count = len({hosts[rank] for rank in ranks})
            found.setdefault((size, count), Placement(ranks, count))
    return tuple(found.values())
