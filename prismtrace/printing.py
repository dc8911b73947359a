"""How the commands of `prismtrace` tell their results to people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from prismtrace import console
from prismtrace.converters import ConvertReport
from prismtrace.info import TraceInfo
from prismtrace.ranks import format_ranks
from prismtrace.schema import ClockDomain

__all__ = ["print_conversion", "print_info"]

MOST_LINES = 16
"""Rows of a table before the rest is only counted; --json has them all."""

WHERE_EXPLAINED = "what each of them means: docs/reference/policies.md"


def print_conversion(report: ConvertReport) -> None:
    """What was found, how ranks were matched, what had to be repaired or assumed."""
    facts: list[tuple[str, object]] = [
        ("ranks", f"{format_ranks(report.ranks)} of {report.world_size}"),
        ("nodes", f"{report.nodes:,} from {report.events:,} events"),
        ("groups", report.groups),
        ("steps", _numbers(report.steps) or "none marked"),
    ]
    if report.missing_ranks:
        absent = console.counted(len(report.missing_ranks), "rank")
        facts.insert(
            1,
            (
                "not given",
                f"{absent} ({format_ranks(report.missing_ranks)}): merge will refuse this trace",
            ),
        )
    _print_facts(facts)
    _table("processes", ["rank", "process"], list(report.processes.items()))
    _table("sync instances", ["members found", "instances"], list(report.matched.items()))
    _print_policies(report.repairs)
    print()


def print_losses(lost: dict[str, int]) -> None:
    """What an exported file cannot say."""
    if lost:
        console.table("rounded or left out", ["what", "times"], list(lost.items()))
        print("what each of them means: docs/guides/chakra.md")
        print()


def print_info(info: TraceInfo) -> None:
    """Facts and tables about a trace."""
    header = info.header
    facts: list[tuple[str, object]] = [
        ("files", f"{len(info.files)}, {info.file_bytes:,} bytes"),
        ("kind", f"{header.kind}, format {header.format_version}"),
        ("ranks", f"{format_ranks(header.ranks)} of {header.world_size}"),
        ("nodes", f"{info.nodes:,}"),
    ]
    if info.window_ns is not None:
        facts.append(("time", f"{_ms(info.window_ns):,.3f} ms from first start to last end"))
    facts += [(name, f"{size}") for name, size in header.axes.items()]
    if info.critical:
        facts.append(("critical path", console.counted(info.critical, "node")))
    facts += [("clock", text) for text in _clock_lines(header.clock)[:MOST_LINES]]
    facts += [("written by", header.created_by)] if header.created_by else []
    _print_facts(facts)
    _print_tables(info)


def _numbers(steps: Sequence[int]) -> str:
    """`1 (number 10)`, `3 (numbers 2-4)`: a lone number would read as a count."""
    if not steps:
        return ""
    what = "number" if len(steps) == 1 else "numbers"
    return f"{len(steps):,} ({what} {format_ranks(steps, strided=False)})"


def _print_facts(facts: list[tuple[str, object]]) -> None:
    for name, value in facts:
        print(f"{name + ':':<14} {console.printable(str(value))}")


def _clock_lines(domains: Sequence[ClockDomain]) -> list[str]:
    """One line for all clocks of which the same is known."""
    alike: dict[tuple[str, int | None], list[ClockDomain]] = {}
    for domain in domains:
        alike.setdefault((domain.source, domain.offset_ns), []).append(domain)
    return [
        f"{source}, ranks {format_ranks(sorted(rank for one in some for rank in one.ranks))}"
        + (f" ({len(some)} clocks)" if len(some) > 1 else "")
        + (", offset unknown" if offset_ns is None else f", offset {offset_ns} ns")
        for (source, offset_ns), some in alike.items()
    ]


def _print_tables(info: TraceInfo) -> None:
    _table(
        "kinds",
        ["kind", "nodes", "total ms", "wait ms", "MB", "unmatched"],
        [
            [k.kind, k.nodes, _ms(k.dur_ns), _ms(k.wait_ns), k.bytes and k.bytes / 1e6, k.unmatched]
            for k in info.kinds
        ],
    )
    _table(
        "groups",
        ["id", "name", "description", "ranks", "nodes"],
        [[g.id, g.name, g.desc, g.ranks, g.nodes] for g in info.groups],
    )
    _table(
        "steps",
        ["step", "nodes", "ms"],
        [[s.step, s.nodes, _span_ms(s.start_ns, s.end_ns)] for s in info.steps],
    )
    _table(
        "ranks",
        ["rank", "nodes", "ms"],
        [[r.rank, r.nodes, _span_ms(r.start_ns, r.end_ns)] for r in info.ranks],
    )
    _table("streams", ["stream", "in the source"], list(info.header.streams.items()))
    _print_policies(info.header.policies)


def _print_policies(policies: dict[str, int]) -> None:
    _table("repairs and assumptions", ["policy", "times"], list(policies.items()))
    if policies:
        print(WHERE_EXPLAINED)


def _table(title: str, columns: list[str], rows: list[Any]) -> None:
    if not rows:
        return
    print()
    console.table(title, columns, rows[:MOST_LINES])
    if len(rows) > MOST_LINES:
        print(f"... and {len(rows) - MOST_LINES} more (--json lists all)")


def _ms(time_ns: int | None) -> float | None:
    return None if time_ns is None else time_ns / 1e6


def _span_ms(start_ns: int | None, end_ns: int | None) -> float | None:
    return None if start_ns is None or end_ns is None else (end_ns - start_ns) / 1e6
