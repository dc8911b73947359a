"""The page docs/reference/columns.md: every column of the node table, read off the schema."""

from __future__ import annotations

from prismtrace.schema import Node, TraceHeader, column_types, nullable_columns

__all__ = ["EXTRA_COLUMNS", "FILLED_BY_MERGE", "columns_page"]

FILLED_BY_MERGE = ("transfer_ns", "transfer_source", "wait_ns", "slack_ns", "critical")
"""Columns that are null in a trace that was converted and not yet merged."""

EXTRA_COLUMNS = {
    "x_kernels": (
        "convert, communication grain",
        "How many kernels (of a CPU trace: operators) a span is made of.",
    ),
    "x_busy_ns": (
        "convert, communication grain; coarsen",
        "Part of a span's duration in which one of them ran; the rest of `dur_ns` is idle inside.",
    ),
    "x_arg_NAME": (
        "convert --keep-arg NAME",
        "What the profiler noted with a kernel under that name; text.",
    ),
    "x_observed_start_ns": (
        "merge",
        "`start_ns` as recorded, in the clock of the rank's domain; null where nothing was seen.",
    ),
    "x_observed_dur_ns": (
        "merge",
        "`dur_ns` as recorded. A merge of the merged trace starts from these two again.",
    ),
    "x_spread_ns": (
        "merge of slices with several samples",
        "How far the samples lie apart that the duration was made of.",
    ),
    "x_send_bytes": (
        "your own",
        "all_to_all: bytes to each member, a list in group order; `--sparse-all-to-all` reads it.",
    ),
    "x_rows": ("coarsen", "How many rows became this one."),
    "x_first_index": ("coarsen", "`index` of the first of them."),
}
"""Columns that commands write or read beyond the format: by whom, and what they hold."""

_INTRODUCTION = """\
# Columns of a trace

Generated from `prismtrace/schema.py` by `make docs`. A trace is a table with one row, a *node*, for
each span of computation and each communication of each rank; `prismtrace.open(path).nodes` has all
of these columns, null where a file does not hold them. Times are integers in nanoseconds, sizes in
bytes; null means "not applicable" or "not known", never 0.

**Before a merge** these columns are null on every row: {empty}.
Their sums are 0 then, for Polars adds up no numbers to 0: merge first, or use `dur_ns`, which holds
waiting and transfer together.

**Idle time.** At the default grain of `convert` (`communication`) a row of computation is a span:
`start_ns` and `dur_ns` reach from the first to the last kernel between two communications. Gaps
between rows then miss the idle time inside spans, which is often the larger part: it is
`dur_ns - x_busy_ns`. At `--grain kernel` every kernel is a row, there is no `x_busy_ns`, and all
idle time of a rank lies between its rows, of all streams together. `prismcalib.predict(...).ranks` has both parts for every rank.
"""

_EXTRA = """\
## Further columns

Names that start with `x_` are no part of the format; every command hands them on. Your own are
welcome. These are known:
"""

_HEADER = """\
## The header

`prismtrace.open(path).header` has these fields; `.groups` of a trace are its process groups, to go
through or, as `.groups.df`, as a table to join with.
"""


def columns_page() -> str:
    """The page as Markdown."""
    nullable = nullable_columns()
    rows = [
        "| column | type | null | meaning |",
        "|---|---|---|---|",
    ]
    for name, column in column_types().items():
        text = _meaning(Node.model_fields[name].description)
        null = "before merge" if name in FILLED_BY_MERGE else "yes" if name in nullable else "never"
        values = "" if column.values is None else f" One of {', '.join(column.values)}."
        rows.append(f"| `{name}` | {column.name} | {null} | {text}{values} |")
    extra = ["| column | written by | meaning |", "|---|---|---|"]
    extra += [f"| `{name}` | {by} | {text} |" for name, (by, text) in EXTRA_COLUMNS.items()]
    header = ["| field | meaning |", "|---|---|"]
    header += [
        f"| `{name}` | {_meaning(field.description)} |"
        for name, field in TraceHeader.model_fields.items()
    ]
    empty = ", ".join(f"`{name}`" for name in FILLED_BY_MERGE)
    return "\n".join(
        [_INTRODUCTION.format(empty=empty), *rows, "", _EXTRA, *extra, "", _HEADER, *header, ""]
    )


def _meaning(description: str | None) -> str:
    return " ".join((description or "").replace("``", "`").split()).replace("|", "\\|")
