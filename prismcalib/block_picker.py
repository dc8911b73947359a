"""Which rows a predicate means, where the rows are read block by block."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np
import polars as pl
from numpy.typing import NDArray

from prismcalib.block_graph import table_of
from prismcalib.blocks import Layout
from prismcalib.chosen_steps import WHOLE_INDEX, whole_numbers
from prismcalib.graph import Int32Array
from prismcalib.predicates import RowPicker

__all__ = ["BlockPicker"]

# In SQL; a Polars expression shows its columns like this.
_FUNCTION = re.compile(r"\b(?!(?:in|and|or|not)\b)\w+\s*\(", re.IGNORECASE)


class BlockPicker(RowPicker):
    """A `RowPicker` that holds no rows: its table has the columns only."""

    layout: Layout

    def __init__(self, layout: Layout) -> None:
        super().__init__(layout.read(0, 1).clear(), layout.trace.header)
        object.__setattr__(self, "layout", layout)

    def evaluate(self, expression: pl.Expr, names: list[str], shown: str) -> NDArray[np.bool_]:
        """As `RowPicker.evaluate`."""
        columns = list(dict.fromkeys(map(_stored, names))) or ["rank"]
        if _FUNCTION.search(shown):
            # The answer for a row may depend on other rows.
            whole = RowPicker(table_of(self.layout, _numbered(columns, self.layout)), self.header)
            return whole.evaluate(expression, names, shown)
        answers = [
            RowPicker(block.nodes, self.header).evaluate(expression, names, shown)
            for block in self.layout.blocks(_numbered(columns, self.layout))
        ]
        return np.concatenate(answers)

    def at(self, numbers: Int32Array) -> pl.DataFrame:
        """As `RowPicker.at`."""
        return self.layout.rows_at(numbers)

    def places(self) -> Iterator[pl.DataFrame]:
        """As `RowPicker.places`."""
        for block in self.layout.blocks(["rank", "kind", "step"]):
            yield block.nodes

    def values(self, name: str) -> pl.Series:
        """As `RowPicker.values`, each once."""
        parts = [
            RowPicker(block.nodes, self.header).values(name).unique()
            for block in self.layout.blocks([_stored(name)])
        ]
        return pl.concat(parts).unique()

    def _is_empty(self, column: str) -> bool:
        stored = self.layout.trace.nodes.select(pl.col(_stored(column)).null_count())
        return bool(stored.collect(engine="streaming").item() == self.layout.total)


def _numbered(columns: list[str], layout: Layout) -> list[str | pl.Expr]:
    """The columns, with numbers of rows as people know them."""
    if WHOLE_INDEX not in layout.columns:
        return [*columns]
    known = whole_numbers()
    return [known.get(name, name) for name in columns]


def _stored(name: str) -> str:
    return "group" if name.startswith("group_") else name
