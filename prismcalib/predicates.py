"""Which rows an edit means: a condition as people type it, over the columns of the trace.

    kind == "all_reduce" and rank < 8
    phase = 'backward' AND group_name LIKE 'tp%' AND bytes BETWEEN 1000 AND 2000000

The language is the expression part of SQL, as Polars reads it.  Nothing is executed: no Python,
no subqueries.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import polars as pl
from numpy.typing import NDArray

from prismcalib.errors import PredicateError
from prismcalib.graph import Int32Array
from prismtrace.group_names import group_labels
from prismtrace.schema import TraceHeader

__all__ = ["Predicate", "RowPicker"]

Predicate = str | pl.Expr
"""A condition: SQL text, or a Polars expression from Python."""

# A text in quotes, a word, or any other character.
_TOKEN = re.compile(r"'(?:[^']|'')*'|\"(?:[^\"]|\"\")*\"|\w+|\s+|.", re.DOTALL)
_FORBIDDEN = {"select", "from", "with"}
_LISTS = ("deps", "xdeps", "lag_ns")
_SHOWN = 12


@dataclass(frozen=True, eq=False)
class RowPicker:
    """The rows of a trace, ready to be asked.

    Attributes:
        rows: the node table.
        header: names the groups: the columns `group_name`, `group_label` and `group_size` come
            from it.
    """

    rows: pl.DataFrame
    header: TraceHeader

    @cached_property
    def columns(self) -> list[str]:
        """What a predicate may name."""
        own = [name for name in self.rows.columns if name not in _LISTS]
        return [*own, "group_name", "group_label", "group_size"]

    def pick(self, where: Predicate) -> NDArray[np.bool_]:
        """bool[n], true for the rows that fulfil the predicate (null counts as false).

        Raises:
            PredicateError: no predicate, an unknown column, types that do not fit, or no row
                that fulfils it: a misspelt name is more likely than a wish to change nothing.
        """
        shown = where if isinstance(where, str) else str(where)
        expression = self._parse(where) if isinstance(where, str) else where
        try:
            names = expression.meta.root_names()
            unknown = [name for name in names if name not in self.columns]
            if unknown:
                raise self._unknown(unknown[0], shown)
            picked = self.evaluate(expression, names, shown)
        except pl.exceptions.PolarsError as error:
            raise PredicateError(
                f"cannot be evaluated: {_first_line(error)}",
                where=shown,
                hint="compare text with text and numbers with numbers (`group` is a number, "
                "`group_name` a text); combine comparisons with and, or, not",
            ) from error
        if not picked.any():
            raise PredicateError("no row fulfils it", where=shown, hint=self._known_values(names))
        return picked

    def evaluate(self, expression: pl.Expr, names: list[str], shown: str) -> NDArray[np.bool_]:
        """bool[n], the answer of an expression over known columns.

        Raises:
            PredicateError: it is not true or false for every row.
            polars.exceptions.PolarsError: types do not fit.
        """
        answer = self._table(names).select(answer=expression).to_series()
        if answer.dtype != pl.Boolean or len(answer) not in (1, self.rows.height):
            raise PredicateError(
                f"gives {answer.dtype}, not true or false for every row",
                where=shown,
                hint="""write a comparison, such as: kind == "all_reduce" and rank < 8""",
            )
        picked = answer.fill_null(value=False).to_numpy()
        if len(picked) != self.rows.height:
            picked = np.full(self.rows.height, picked[0])
        return picked

    def at(self, numbers: Int32Array) -> pl.DataFrame:
        """The rows of these numbers, all columns."""
        return self.rows[numbers]

    def places(self) -> Iterator[pl.DataFrame]:
        """Columns rank, kind and step (and more) of all rows, in order, whole ranks at a time."""
        yield self.rows

    def values(self, name: str) -> pl.Series:
        """What a column contains, apart from nulls."""
        return self._table([name])[name].drop_nulls()

    def _parse(self, text: str) -> pl.Expr:
        """SQL means columns by double quotes; people who write == mean texts."""
        parts = []
        for token in _TOKEN.findall(text):
            if token.lower() in _FORBIDDEN:
                raise PredicateError(
                    f"{token} is not allowed in a predicate",
                    where=text,
                    hint="only a condition on one row, without subqueries",
                )
            quoted = token.startswith('"') and len(token) > 1
            if quoted and token[1:-1].replace('""', '"') not in self.columns:
                inner = token[1:-1].replace('""', '"').replace("'", "''")
                parts.append(f"'{inner}'")
            elif token.lower() == "group":
                # A column of the trace, and a keyword of SQL.
                parts.append('"group"')
            else:
                parts.append(token)
        try:
            return pl.sql_expr("".join(parts))
        except (pl.exceptions.PolarsError, ValueError) as error:
            raise PredicateError(
                f"cannot be read: {_first_line(error)}",
                where=text,
                hint="an SQL condition with and, or, not, such as: "
                """kind == "all_reduce" and rank < 8""",
            ) from error

    def _table(self, names: list[str]) -> pl.DataFrame:
        """The named columns, texts as texts so that unknown values compare as unequal."""
        for name in names:
            if name not in self._ready:
                self._ready[name] = self._column(name)
        # A predicate without columns still speaks about rows.
        return pl.DataFrame(
            [self._ready[name] for name in dict.fromkeys(names)] or self.rows["rank"]
        )

    @cached_property
    def _ready(self) -> dict[str, pl.Series]:
        """Columns that some predicate has asked for."""
        return {}

    def _column(self, name: str) -> pl.Series:
        groups = self.header.groups
        if name == "group_name":
            names = {group.id: group.name for group in groups}
            found = self.rows["group"].replace_strict(names, default=None, return_dtype=pl.String)
        elif name == "group_label":
            labels = group_labels(groups)
            found = self.rows["group"].replace_strict(labels, default=None, return_dtype=pl.String)
        elif name == "group_size":
            sizes = {group.id: len(group.ranks) for group in groups}
            found = self.rows["group"].replace_strict(sizes, default=None, return_dtype=pl.Int64)
        else:
            found = self.rows[name]
            if isinstance(found.dtype, pl.Enum | pl.Categorical):
                found = found.cast(pl.String)
        return found.alias(name)

    def _unknown(self, name: str, shown: str) -> PredicateError:
        near = difflib.get_close_matches(name, self.columns, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        if column := self._column_with(name):
            hint = f"text stands in quotes: {column} = '{name}'; "
        usable = [column for column in self.columns if not self._is_empty(column)]
        return PredicateError(
            f"there is no column {name}",
            where=shown,
            hint=f"{hint}columns with values: {', '.join(usable)}",
        )

    def _column_with(self, text: str) -> str | None:
        """A column in which the text is a value."""
        texts = ("kind", "phase", "group_name", "group_label", "dtype", "reduce_op", "name")
        for column in texts:
            if (
                column in self.columns
                and not self._is_empty(column)
                and (self.values(column) == text).any()
            ):
                return column
        return None

    def _is_empty(self, column: str) -> bool:
        name = "group" if column.startswith("group_") else column
        return self.rows[name].null_count() == self.rows.height

    def _known_values(self, names: list[str]) -> str:
        """What the columns of a predicate that fits nothing contain."""
        texts = []
        for name in dict.fromkeys(names):
            values = self.values(name)
            if not len(values):
                texts.append(f"{name} is empty in this trace")
            elif values.dtype == pl.String:
                found = values.unique().sort().to_list()
                more = ", ..." if len(found) > _SHOWN else ""
                texts.append(f"{name} is one of {', '.join(map(repr, found[:_SHOWN]))}{more}")
            else:
                texts.append(f"{name} runs from {values.min()!r} to {values.max()!r}")
        return "; ".join(texts) or "it is never true"


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
