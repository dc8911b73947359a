"""Questions about a trace in SQL, answered by Polars.

The tables are `nodes` (the node table, columns of enums and categories as text), `groups` (id,
name, desc, label, size, ranks) and `header` (one row).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import IO

import polars as pl

from prismtrace.answer_names import name_columns
from prismtrace.errors import QueryError
from prismtrace.output import atomic_output, refuse_inputs
from prismtrace.ranks import format_ranks
from prismtrace.reading import reading
from prismtrace.trace import PathLike, Trace

__all__ = ["AnswerFormat", "answering", "query", "write_answer", "write_json"]

_TABLES = "the tables are nodes, groups and header"
_ONLY_SELECT = "the SQL is no SELECT: a trace can be asked, not changed"
_CHANGES = re.compile(r"(?:\s|--[^\n]*\n)*(?:delete|truncate)\b", re.IGNORECASE)
_PLAN = re.compile(r"\n\n(?:Resolved plan until failure|This error occurred).*", re.DOTALL)


class AnswerFormat(StrEnum):
    """What an answer can be written as."""

    CSV = "csv"
    JSON = "json"
    """A list of objects, one per row."""
    PARQUET = "parquet"


def query(trace: Trace, sql: str) -> pl.LazyFrame:
    """The answer to a SELECT over the tables nodes, groups and header, not yet computed.

    Columns of ``nodes`` are those of `Node`, of ``groups`` those of `GroupTable.df`; ``header``
    has one row: kind, world_size, ranks, steps, axes, created_by, sources, policies, extra, as
    in `TraceHeader`. ``group`` is a word of SQL: the column is written
    ``"group"`` or ``nodes.group``. A column without a name is called as it is written:
    ``COUNT(*)``.

    Args:
        trace: what is asked; rows are read when the answer is collected, and only those needed.
        sql: a SELECT.

    Raises:
        QueryError: not valid SQL, or it names what is not there.
    """
    tables = {
        "nodes": trace.nodes.with_columns(_as_text(trace.nodes.collect_schema())),
        "groups": trace.groups.df.lazy(),
        "header": _header_table(trace).lazy(),
    }
    if _CHANGES.match(sql):
        raise QueryError(_ONLY_SELECT, hint="write SELECT ... FROM nodes")
    context = pl.SQLContext(tables, eager=False)
    with answering():
        answer = context.execute(sql)
        if not answer.collect_schema() or context.tables() != sorted(tables):
            raise QueryError(
                "the SQL does not ask for anything", hint="write SELECT ... FROM nodes"
            )
        return name_columns(answer, sql)


def _as_text(schema: pl.Schema) -> list[pl.Expr]:
    """Enums and categories as text: comparing an enum with a word that it lacks is an error."""
    return [
        pl.col(name).cast(pl.String)
        for name, dtype in schema.items()
        if isinstance(dtype, pl.Enum | pl.Categorical)
    ]


def _header_table(trace: Trace) -> pl.DataFrame:
    header = trace.header
    return pl.DataFrame(
        {
            "kind": [header.kind.value],
            "world_size": [header.world_size],
            "ranks": [format_ranks(header.ranks)],
            "steps": [list(header.steps)],
            "axes": [json.dumps(header.axes)],
            "created_by": [header.created_by],
            "sources": [list(header.sources)],
            "policies": [json.dumps(header.policies)],
            "extra": [json.dumps(header.extra)],
        },
        schema_overrides={"steps": pl.List(pl.Int64), "sources": pl.List(pl.String)},
    )


@contextmanager
def answering() -> Iterator[None]:
    """Say in our words what is wrong about a query that is computed in this block.

    Raises:
        QueryError: see above.
    """
    try:
        yield
    except pl.exceptions.PanicException as error:
        raise QueryError("the SQL asks for what cannot be computed", hint=_TABLES) from error
    except (pl.exceptions.PolarsError, TypeError, ValueError) as error:
        told = _PLAN.sub("", str(error)).strip()
        if "parquet" in told.lower() or "os error" in told:
            raise  # not the query's fault
        message, hint = _explained(told)
        raise QueryError(message, hint=hint) from error


def _explained(told: str) -> tuple[str, str]:
    """What Polars says about a query, and what to do."""
    if found := re.search(r"unable to find column \"(.*?)\"; valid columns: \[(.*)\]", told):
        columns = found[2].replace('"', "")
        return f"there is no column {found[1]!r}", f"the columns are {columns}"
    if found := re.search(r"relation '(.*?)' was not found", told):
        return f"there is no table {found[1]!r}", _TABLES
    if "one (and only one) statement" in told:
        return "the SQL has no statement, or several", "write one SELECT"
    if "statement type is not supported" in told:
        return _ONLY_SELECT, "write SELECT ... FROM nodes"
    if "sql parser error" in told:
        place = told.partition("sql parser error: ")[2]
        hint = 'words of SQL such as group are written as "group" where they name a column'
        return f"not valid SQL: {place[:1].lower()}{place[1:]}", hint
    if "does not support nested data" in told:
        return "CSV has no lists", "leave out columns such as deps, or write JSON or Parquet"
    return " ".join(told.split()), f"{_TABLES}; CAST changes types"


def write_answer(
    answer: pl.LazyFrame, path: PathLike, to: AnswerFormat | str, *, trace: Trace
) -> None:
    """Compute an answer and write it to a file, streaming; an old file is replaced when whole.

    Raises:
        ValueError: `to` is no `AnswerFormat`.
        QueryError: the answer cannot be computed, or not be written in this form.
        OutputError: the file cannot be written, or is one of the trace's.
    """
    form = AnswerFormat(to)
    refuse_inputs(path, trace.paths)
    with reading(trace.paths), answering(), atomic_output(path) as temporary:
        if form is AnswerFormat.CSV:
            answer.sink_csv(temporary)
        elif form is AnswerFormat.PARQUET:
            answer.sink_parquet(temporary)
        else:
            with temporary.open("w", encoding="utf-8") as file:
                write_json(answer, file)


def write_json(answer: pl.LazyFrame, file: IO[str]) -> None:
    """Write rows as a JSON list of objects, a batch at a time."""
    begun = False
    file.write("[")
    for batch in answer.collect_batches(maintain_order=True):
        if batch.height:
            file.write(",\n" if begun else "\n")
            # A row a line, without the brackets of the batch.
            file.write(batch.write_ndjson().rstrip("\n").replace("\n", ",\n"))
            begun = True
    file.write("\n]\n" if begun else "]\n")
