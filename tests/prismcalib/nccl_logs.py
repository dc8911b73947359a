"""Logs in the layouts that nccl-tests has printed over the years, with times of our own."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

FACTORS = {
    "all_reduce": lambda k: 2 * (k - 1) / k,
    "broadcast": lambda _: 1,
    "reduce": lambda _: 1,
    "sendrecv": lambda _: 1,
}


def link(alpha_us: float, gb_per_s: float) -> Callable[[int, int], float]:
    """Time in us of an all_reduce around a ring."""
    return lambda size, ranks: (
        alpha_us * 2 * (ranks - 1) + size * 2 * (ranks - 1) / ranks / gb_per_s / 1e3
    )


def devices(ranks: int, hosts: int = 1, *, group: bool = True, color: int = 1) -> list[str]:
    per_host = ranks // hosts
    lines = []
    for rank in range(ranks):
        middle = f" Group {rank % color:2d}" if group else ""
        lines.append(
            f"#  Rank {rank:2d}{middle} Pid {4000 + rank:6d} on     node-{rank // per_host} "
            f"device {rank % per_host:2d} [0x{rank:02x}] Some GPU 80GB"
        )
    return lines


def modern(
    rows: Sequence[tuple[int, float, float]],
    *,
    test: str = "all_reduce",
    ranks: int = 8,
    hosts: int = 1,
    color: int = 1,
    dtype: str = "float",
    itemsize: int = 4,
    named: bool = True,
    timestamps: bool = False,
) -> str:
    """Since 2022: `rows` are size, time out of place and in place in us."""
    taking_part = ranks // color
    factor = FACTORS.get(test, lambda k: (k - 1) / k)(taking_part)
    redop, root = ("sum", -1) if "reduce" in test else ("none", -1)
    lines = []
    if named:
        lines += ["# nccl-tests version 2.17.6 nccl-headers=22807 nccl-library=22807"]
        lines += [f"# Collective test starting: {test}_perf"]
    lines += [
        (
            f"# nThread 1 nGpus 1 minBytes {rows[0][0]} maxBytes {rows[-1][0]} step: 2(factor) "
            "warmup iters: 5 iters: 20 agg iters: 1 validation: 1 graph: 0"
        ),
        "#",
        "# Using devices",
        *devices(ranks, hosts, color=color),
        "#",
        (
            f"# {'':>10}  {'':>12}  {'':>8}  {'':>6}  {'':>6}           out-of-place"
            "                       in-place          "
        ),
        f"# {'size':>10}  {'count':>12}  {'type':>8}  {'redop':>6}  {'root':>6}  {'time':>7}  "
        f"{'algbw':>6}  {'busbw':>6} {'#wrong':>6}  {'time':>7}  {'algbw':>6}  {'busbw':>6} "
        f"{'#wrong':>6}" + ("            timestamp" if timestamps else ""),
        (
            f"# {'(B)':>10}  {'(elements)':>12}  {'':>8}  {'':>6}  {'':>6}  {'(us)':>7}  "
            f"{'(GB/s)':>6}  {'(GB/s)':>6}  {'':>5}  {'(us)':>7}  {'(GB/s)':>6}  {'(GB/s)':>6}"
        ),
    ]
    for size, *times in rows:
        halves = []
        for time in times:
            bandwidth = size / time / 1e3
            halves.append(f"  {time:7.2f}  {bandwidth:6.2f}  {bandwidth * factor:6.2f}      0")
        stamp = "  2026-01-01 10:00:00" if timestamps else ""
        head = f"{size:12d}  {size // itemsize:12d}  {dtype:>8}  {redop:>6}  {root:6d}"
        lines.append(head + "".join(halves) + stamp)
    lines += ["# Out of bounds values : 0 OK", "# Avg bus bandwidth    : 47.6124 ", "#"]
    if named:
        lines += [f"# Collective test concluded: {test}_perf"]
    return "\n".join(lines) + "\n"


def of_2019(rows: Sequence[tuple[int, float, float]], *, ranks: int = 8) -> str:
    """An all_gather as printed in 2019: no redop, no root, `error`, no groups."""
    lines = [
        (
            "# nThread 1 nGpus 8 minBytes 8 maxBytes 1024 step: 2(factor) warmup iters: 5 iters: 20 "
            "validation: 1 "
        ),
        "#",
        "# Using devices",
        *(line.replace("#  Rank", "#   Rank") for line in devices(ranks, group=False)),
        "#",
        "#                                       out-of-place                       in-place",
        (
            "#       size         count    type     time   algbw   busbw  error     time   algbw   "
            "busbw  error"
        ),
        (
            "#        (B)    (elements)             (us)  (GB/s)  (GB/s)            (us)  (GB/s)  "
            "(GB/s)       "
        ),
    ]
    for size, *times in rows:
        halves = "".join(
            f"  {time:7.2f}  {size / time / 1e3:6.2f}  "
            f"{size / time / 1e3 * (ranks - 1) / ranks:6.2f}  1e-07"
            for time in times
        )
        lines.append(f"{size:12d}  {size // 4:12d}   float{halves}")
    return "\n".join([*lines, "# Out of bounds values : 0 OK"]) + "\n"


def of_2017(rows: Sequence[tuple[int, float, float]], *, ranks: int = 4) -> str:
    """The first layout: times in ms, other names of columns."""
    lines = [
        ("nThread 1 nGpus 4 minBytes 1024 maxBytes 4096 step: 2(factor) warmup iters: 5 iters: 20 "
        "validation: 1 "),
        "# NCCL Tests compiled with NCCL 2.0",
        "# Using devices",
        *(f"#   Rank {rank:2d} on     node-0 device {rank:2d} [0x0{rank}] Some GPU" for rank in range(ranks)),
        "",
        "#                                                 out-of-place                    in-place",
        ("#      bytes             N    type      op     time  algbw  busbw      res     time  "
        "algbw  busbw      res"),
    ]  # fmt: skip
    for size, *times in rows:
        halves = "".join(
            f"  {time / 1e3:7.3f}  {size / time / 1e3:5.2f}  "
            f"{size / time / 1e3 * 2 * (ranks - 1) / ranks:5.2f}    1e-06"
            for time in times
        )
        lines.append(f"{size:12d}  {size // 4:12d}   float     sum{halves}")
    return "\n".join([*lines, "", " Out of bounds values : 0 OK"]) + "\n"


def as_json(rows: Sequence[tuple[int, float, float]], *, test: str, ranks: int, ngpus: int) -> str:
    """What `-J` writes: of every process the first device only."""
    factor = FACTORS.get(test, lambda k: (k - 1) / k)(ranks)

    def half(size: int, time: float) -> dict[str, float]:
        bandwidth = size / time / 1e3
        return {"time": time, "alg_bw": bandwidth, "bus_bw": bandwidth * factor, "nwrong": 0.0}

    return json.dumps(
        {
            "version": 3,
            "args": [f"./build/{test}_perf", "-J", "out.json"],
            "config": {
                "nthreads": 1,
                "ngpus": ngpus,
                "devices": [
                    {"rank": rank, "group": 0, "hostname": f"node-{rank // ngpus}", "device": 0}
                    for rank in range(0, ranks, ngpus)
                ],
            },
            "results": [
                {"size": size, "count": size // 4, "type": "float", "redop": "sum", "root": "-1"}
                | {"out_of_place": half(size, out), "in_place": half(size, within)}
                for size, out, within in rows
            ],
            "errors": [],
        }
    )
