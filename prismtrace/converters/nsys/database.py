"""Reading an SQLite file that may lack tables and columns, hold other types, or be damaged.

Nsight Systems creates tables and columns as its versions and options have them, and SQLite
lets a column hold anything. Numbers come out as 64-bit integers or null; whatever is missing
is counted, never an exception.
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from itertools import chain
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import polars as pl

from prismtrace.converters.content import GZIP_MAGIC, read_blocks
from prismtrace.errors import InputFileError

__all__ = ["Database", "open_database"]

_ROWS = 16 * 1024
_NULL = -(2**63)
# A row takes more bytes than this; a damaged file can lead SQLite around in circles.
_LEAST_ROW_BYTES = 4
_LONGEST_VALUE = 16 * 2**20
_TEXT_ROWS = 1024
_OPERATIONS = 100_000  # of SQLite's machine, between two looks
_LARGEST_GROWTH = 64  # of the file, in memory: a text may stand for many rows
_LONGEST_NAME = 64 * 1024
_MOST_AT_ONCE = 500  # values in one query


class Database:
    """An open file. Every method raises InputFileError when it is damaged, unless `recover`."""

    def __init__(
        self,
        connection: sqlite3.Connection,
        path: Path,
        size: int,
        counts: Counter[str],
        *,
        recover: bool,
    ) -> None:
        self._connection = connection
        self._path = path
        self._size = size
        self._counts = counts
        self._recover = recover
        self._columns: dict[str, Mapping[str, str]] = {}
        self._patience = 1000 + size // 1000
        connection.set_progress_handler(self._watch, _OPERATIONS)
        listed = self.rows("SELECT name FROM sqlite_master WHERE type = 'table'")
        self._tables = frozenset(str(name) for (name,) in listed)

    def _watch(self) -> bool:
        """Called by SQLite as it works: whether it should give up.

        A few operations a row are normal; pages that point at each other can take for ever.
        """
        self._patience -= 1
        return self._patience < 0

    def columns(self, table: str) -> Mapping[str, str]:
        """Columns of a table, by name in lower case; none when the table is not there."""
        if table not in self._tables:
            return {}
        if table not in self._columns:
            found = self.rows(f"PRAGMA table_info({_quoted(table)})")
            self._columns[table] = {str(row[1]).lower(): str(row[1]) for row in found}
        return self._columns[table]

    def integers(
        self,
        table: str,
        names: Sequence[str],
        required: Sequence[str] = ("start", "end"),
        where: str = "",
    ) -> pl.DataFrame:
        """Integer columns of a table; null where a value is no integer or there is no column.

        Args:
            table: its name.
            names: columns.
            required: those of them without which a row means nothing. Rows that lack one are
                counted as `dropped-no-time`.
            where: condition on the rows, in SQL.
        """
        present = self.columns(table)
        chosen = [name for name in names if name.lower() in present]
        lacking = [name for name in required if name.lower() not in present]
        if lacking or not chosen:
            self._counts["unusable-table"] += bool(present)
            return _typed({name: np.array([], np.int64) for name in names})
        self._counts["absent-column"] += len(names) - len(chosen)
        cells = ", ".join(_integer(present[name.lower()]) for name in chosen)
        query = f"SELECT {cells} FROM {_quoted(table)}" + (f" WHERE {where}" if where else "")  # noqa: S608 - our names
        width = len(chosen)
        blocks = [
            np.fromiter(chain.from_iterable(rows), np.int64, len(rows) * width).reshape(-1, width)
            for rows in self.blocks(query)
        ]
        table_of = np.concatenate(blocks) if blocks else np.empty((0, width), np.int64)
        if required:
            known = (table_of[:, [chosen.index(name) for name in required]] != _NULL).all(axis=1)
            self._counts["dropped-no-time"] += int((~known).sum())
            table_of = table_of[known]
        values = {name: np.ascontiguousarray(table_of[:, i]) for i, name in enumerate(chosen)}
        empty = np.full(len(table_of), _NULL)
        return _typed({name: values.get(name, empty) for name in names})

    def strings(self, ids: Sequence[int]) -> dict[int, str]:
        """Entries of the table of texts."""
        if not {"id", "value"} <= set(self.columns("StringIds")):
            return {}
        found: dict[int, str] = {}
        for first in range(0, len(ids), _MOST_AT_ONCE):
            listed = ", ".join(str(int(i)) for i in ids[first : first + _MOST_AT_ONCE])
            query = f"SELECT id, substr(value, 1, {_LONGEST_NAME}) FROM StringIds WHERE id IN ({listed})"  # noqa: S608
            found |= {
                key: value
                for key, value in self.rows(query)
                if isinstance(key, int) and isinstance(value, str)
            }
        return found

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        """All rows of a query."""
        return list(chain.from_iterable(self.blocks(query, texts=True)))

    def blocks(self, query: str, *, texts: bool = False) -> Iterator[list[tuple[Any, ...]]]:
        """The rows of a query, some thousands at a time; damage ends them.

        With `texts` their size is watched, too: damaged rows may share one long text.
        """
        most = self._size // _LEAST_ROW_BYTES + 1000
        left = _LARGEST_GROWTH * self._size + _LONGEST_VALUE
        try:
            cursor = self._connection.execute(query)
            while rows := cursor.fetchmany(_TEXT_ROWS if texts else _ROWS):
                most -= len(rows)
                if texts:
                    cells = chain.from_iterable(rows)
                    left -= sum(len(cell) for cell in cells if isinstance(cell, str | bytes))
                if most < 0 or left < 0:
                    raise sqlite3.DatabaseError("more rows than fit into the file")
                yield rows
        except (sqlite3.Error, ValueError, OverflowError) as error:  # its texts are not UTF-8 then
            if not self._recover:
                raise _damaged(self._path, error) from error
            self._counts["truncated"] += 1


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _integer(column: str) -> str:
    name = _quoted(column)
    return f"ifnull(CASE typeof({name}) WHEN 'integer' THEN {name} END, {_NULL + 1} - 1)"


def _typed(columns: Mapping[str, Any]) -> pl.DataFrame:
    frame = pl.DataFrame(
        {name: pl.Series(values, dtype=pl.Int64) for name, values in columns.items()}
    )
    return frame.with_columns(pl.when(pl.all() != _NULL).then(pl.all()))


def _damaged(path: Path, error: Exception) -> InputFileError:
    return InputFileError(
        f"the database is damaged or cut short ({error})",
        where=str(path),
        hint="export it again (nsys export --type sqlite), or use what can be read with --recover",
    )


@contextmanager
def open_database(
    path: Path, scratch: Path, counts: Counter[str], *, recover: bool
) -> Iterator[Database]:
    """Open an SQLite file, gzipped or not, for reading only.

    Args:
        path: the file.
        scratch: where to unpack a gzipped one; removed in the end.
        counts: what is missing or damaged is counted here.
        recover: read up to the damage instead of raising.

    Raises:
        InputFileError: it cannot be read.
    """
    with path.open("rb") as file:
        zipped = file.read(2) == GZIP_MAGIC
    source = path
    if zipped:
        source = scratch
        with scratch.open("wb") as target:
            for block in read_blocks(path, counts=counts):
                target.write(block)
    try:
        # A path is not UTF-8 at times; SQLite takes bytes, escaped.
        name = f"file:{quote(bytes(source.absolute()))}?mode=ro&immutable=1"
        try:
            connection = sqlite3.connect(name, uri=True)
        except (sqlite3.Error, ValueError) as error:
            raise _damaged(path, error) from error
        with closing(connection):
            connection.text_factory = _text
            connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _LONGEST_VALUE)
            for pragma in ("trusted_schema = OFF", "query_only = ON", "cell_size_check = ON"):
                _ignoring(connection.execute, f"PRAGMA {pragma}")
            size = source.stat().st_size
            yield Database(connection, path, size, counts, recover=recover)
    finally:
        if zipped:
            scratch.unlink(missing_ok=True)


def _ignoring(function: Callable[[str], object], argument: str) -> None:
    """Settings of which an old SQLite knows not all; a damaged file fails later, with a reason."""
    try:
        function(argument)
    except (sqlite3.Error, ValueError):
        return


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "replace")
