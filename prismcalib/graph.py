"""The execution graph as arrays: what propagation reads.

One row per operation, in (rank, index) order, so that the rows of a rank lie together and
most dependencies point a short way back.  Propagation of shuffled rows is correct too, but
several times slower.

Three kinds of constraint connect rows:

* a *dependency* of row n on row p: n starts no earlier than p's end plus a lag;
* a *sync instance*: one execution of a collective or of one matched send-recv pair.  Its
  members wait until the last of them has started, then each transfers for its own duration;
* a *wait* of row n for row m, where not everybody waits for everybody (`prismcalib.waiting`):
  after its own start, n waits until m has started as well, then transfers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from prismcalib.errors import CalibError

__all__ = ["MAX_TOTAL_NS", "Graph", "Int32Array", "Int64Array"]

Int32Array = NDArray[np.int32]
"""A NumPy array of 32-bit integers; docstrings give its shape."""
Int64Array = NDArray[np.int64]
"""A NumPy array of 64-bit integers; docstrings give its shape."""

# Rows and dependencies are numbered with int32.
_MAX_COUNT = 2**31 - 2
# Twice the longest possible path must fit into int64, so that no engine needs overflow checks.
MAX_TOTAL_NS = 2**62


@dataclass(frozen=True, eq=False, kw_only=True)
class Graph:
    """n operations, e dependencies and G sync instances.

    Attributes:
        duration_ns: int64[n].  Of a computation its duration; of a sync member its transfer,
            the time from the arrival of the last member to the end.
        dep_offsets: int64[n + 1].  Row i depends on `dep_rows[dep_offsets[i]:dep_offsets[i + 1]]`.
        dep_rows: int32[e], row numbers.
        instance: int32[n], number of the sync instance a row is a member of, or -1.
        instance_size: int32[G], how many members the instance needs to complete.
        dep_lag_ns: int64[e], least time between the end of the dependency and the start of
            the row; None if no dependency has a lag.
        release_ns: int64[n], earliest start of every row; None if all may start at 0.
        wait_offsets, wait_rows: int64[n + 1] and int32[w], or None: once it has started, row i
            waits for the starts of `wait_rows[wait_offsets[i]:wait_offsets[i + 1]]`.  Such a
            row is in no sync instance.
        labels: names a row in error texts (rank, kind, name, group, seq).

    Any integer arrays are accepted; the attributes are read-only arrays of the types above.

    Raises:
        CalibError: shapes, ranges or signs are wrong; `where` names the attribute.
    """

    duration_ns: Int64Array
    dep_offsets: Int64Array
    dep_rows: Int32Array
    instance: Int32Array
    instance_size: Int32Array
    dep_lag_ns: Int64Array | None = None
    release_ns: Int64Array | None = None
    wait_offsets: Int64Array | None = None
    wait_rows: Int32Array | None = None
    labels: Callable[[int], str] | None = None

    # What networkx asks of a graph before it hands it to `prismcalib.networkx_backend`.
    __networkx_backend__: ClassVar[str] = "prismcalib"

    def __post_init__(self) -> None:
        for name, dtype in _COLUMNS.items():
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, _column(name, value, dtype))
        self.validate()

    @classmethod
    def from_lists(
        cls,
        durations_ns: Sequence[int],
        deps: Sequence[Sequence[int]],
        *,
        lags_ns: Sequence[Sequence[int]] | None = None,
        instances: Sequence[int] | None = None,
        instance_sizes: Sequence[int] | None = None,
        releases_ns: Sequence[int] | None = None,
        waits: Sequence[Sequence[int]] | None = None,
        labels: Callable[[int], str] | None = None,
    ) -> Graph:
        """Build a small graph by hand: one list of dependencies, lags and waits per row.

        Without `instance_sizes` every instance expects the members that it has.
        """
        members = np.asarray([-1] * len(deps) if instances is None else instances, np.int64)
        sizes = np.bincount(members[members >= 0]) if instance_sizes is None else instance_sizes
        return cls(
            duration_ns=_ints(durations_ns),
            dep_offsets=np.cumsum([0, *(len(row) for row in deps)]),
            dep_rows=_column("dep_rows", _ints([dep for row in deps for dep in row]), np.int32),
            instance=_column("instance", members, np.int32),
            instance_size=_column("instance_size", _ints(sizes), np.int32),
            dep_lag_ns=None if lags_ns is None else _ints([lag for row in lags_ns for lag in row]),
            release_ns=None if releases_ns is None else _ints(releases_ns),
            wait_offsets=None if waits is None else np.cumsum([0, *(len(row) for row in waits)]),
            wait_rows=None
            if waits is None
            else _column("wait_rows", _ints([m for row in waits for m in row]), np.int32),
            labels=labels,
        )

    def is_directed(self) -> bool:
        """True; for networkx, as the next four."""
        return True

    def is_multigraph(self) -> bool:
        """False."""
        return False

    def __len__(self) -> int:
        return self.rows

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.rows))

    def __contains__(self, row: object) -> bool:
        return row in range(self.rows)

    @property
    def rows(self) -> int:
        """Number of operations n."""
        return len(self.duration_ns)

    @property
    def instances(self) -> int:
        """Number of sync instances G."""
        return len(self.instance_size)

    @cached_property
    def members_present(self) -> Int64Array:
        """int64[G], how many rows are members of each sync instance."""
        counts = np.bincount(self.instance + np.int32(1), minlength=self.instances + 1)
        return counts[1:].astype(np.int64, copy=False)

    @property
    def idle_ns(self) -> float:
        """What lags and releases can add to the longest path at most."""
        total = 0.0
        if self.dep_lag_ns is not None:
            total += float(self.dep_lag_ns.sum(dtype=np.float64))
        if self.release_ns is not None and self.rows:
            total += float(self.release_ns.max()) - float(self.release_ns.min())
        return total

    def deps(self, row: int) -> Int32Array:
        """Rows that `row` depends on."""
        return self.dep_rows[self.dep_offsets[row] : self.dep_offsets[row + 1]]

    def lags(self, row: int) -> Int64Array:
        """int64 lag of each of `deps(row)`."""
        if self.dep_lag_ns is None:
            return np.zeros(len(self.deps(row)), np.int64)
        return self.dep_lag_ns[self.dep_offsets[row] : self.dep_offsets[row + 1]]

    def waits(self, row: int) -> Int32Array:
        """Rows whose start `row` waits for after its own, sync instances aside."""
        if self.wait_rows is None or self.wait_offsets is None:
            return np.empty(0, np.int32)
        return self.wait_rows[self.wait_offsets[row] : self.wait_offsets[row + 1]]

    def cut(self, part: slice) -> Graph:
        """The rows of `part`, numbered from 0; instances keep their numbers, waits are left out.

        Raises:
            CalibError: a row depends on one outside of the part.
        """
        first, last = self.dep_offsets[part.start], self.dep_offsets[part.stop]
        return Graph(
            duration_ns=self.duration_ns[part],
            dep_offsets=self.dep_offsets[part.start : part.stop + 1] - first,
            dep_rows=self.dep_rows[first:last] - part.start,
            dep_lag_ns=None if self.dep_lag_ns is None else self.dep_lag_ns[first:last],
            instance=self.instance[part],
            instance_size=self.instance_size,
            release_ns=None if self.release_ns is None else self.release_ns[part],
        )

    @cached_property
    def expanded(self) -> Graph:
        """The same graph with dependencies in place of waits; itself if there are no waits.

        Every row that waits or is waited for gets an *arrival*: a row of no duration, numbered
        from n on in the order of `arriving`, which takes over what the row depends on.  The
        row itself depends on its arrival and on the arrivals it waits for.
        """
        if self.wait_offsets is None:
            return self
        n, arriving = self.rows, self.arriving
        extra = len(arriving)
        owner, dep_rows, source = self._expansion
        lags, release = None, self.release_ns
        if self.dep_lag_ns is not None and len(self.dep_lag_ns):
            lags = np.where(source >= 0, self.dep_lag_ns[source], 0)
        if release is not None:
            release = np.append(release, release[arriving])
            release[arriving] = release.min(initial=0)
        return replace(
            self,
            duration_ns=np.append(self.duration_ns, np.zeros(extra, np.int64)),
            dep_offsets=np.append([0], np.cumsum(np.bincount(owner, minlength=n + extra))),
            dep_rows=dep_rows,
            dep_lag_ns=lags,
            instance=np.append(self.instance, np.full(extra, -1, np.int32)),
            release_ns=release,
            wait_offsets=None,
            wait_rows=None,
            labels=lambda row: self.label(self.original(row)),
        )

    @property
    def expanded_lag_source(self) -> Int64Array:
        """int64[e'], which of the e dependencies each one of `expanded` was, or -1."""
        if self.wait_offsets is None:
            return np.arange(len(self.dep_rows))
        return self._expansion[2]

    @cached_property
    def _expansion(self) -> tuple[Int32Array, Int32Array, Int64Array]:
        """Dependencies of `expanded` by row: owner, dependency, number of the original or -1."""
        assert self.wait_offsets is not None  # noqa: S101 - asked only if there are waits
        assert self.wait_rows is not None  # noqa: S101
        arriving = self.arriving
        arrival = np.arange(self.rows, dtype=np.int32)
        arrival[arriving] = np.arange(self.rows, self.rows + len(arriving))
        # What rows keep or hand over to their arrivals, then what they get in exchange.
        owner = np.concatenate(
            [
                np.repeat(arrival, np.diff(self.dep_offsets)),
                arriving,
                np.repeat(np.arange(self.rows, dtype=np.int32), np.diff(self.wait_offsets)),
            ]
        )
        dep_rows = np.concatenate([self.dep_rows, arrival[arriving], arrival[self.wait_rows]])
        source = np.full(len(owner), -1)
        source[: len(self.dep_rows)] = np.arange(len(self.dep_rows))
        order = np.argsort(owner, kind="stable")
        return owner[order], dep_rows[order], source[order]

    @cached_property
    def arriving(self) -> Int32Array:
        """Rows, ascending, that have an arrival of their own in `expanded`."""
        if self.wait_rows is None or self.wait_offsets is None:
            return np.empty(0, np.int32)
        waiting = np.flatnonzero(np.diff(self.wait_offsets)).astype(np.int32)
        return np.union1d(waiting, self.wait_rows)

    def original(self, row: int) -> int:
        """The row that row `row` of `expanded` stands for."""
        return row if row < self.rows else int(self.arriving[row - self.rows])

    def label(self, row: int) -> str:
        """What error texts call the row."""
        return f"row {row}" if self.labels is None else self.labels(int(row))

    def validate(self) -> None:
        """Check everything an engine relies on; a constructed graph has passed it.

        Cycles and missing members are not looked for here: propagation finds them.

        Raises:
            CalibError: see the class.
        """
        self._check_shapes()
        self._check_ranges()
        self._check_signs()
        self._check_members()

    def _check_shapes(self) -> None:
        n, e = self.rows, len(self.dep_rows)
        for count, name in ((n, "duration_ns"), (e, "dep_rows"), (self.instances, "instance_size")):
            if count > _MAX_COUNT:
                raise _invalid(name, f"{count} entries; at most {_MAX_COUNT} are supported")
        if (self.wait_rows is None) != (self.wait_offsets is None):
            raise _invalid("wait_rows", "wait_offsets and wait_rows come together")
        expected = {"dep_offsets": n + 1, "instance": n, "dep_lag_ns": e, "release_ns": n}
        expected["wait_offsets"] = n + 1
        for name, length in expected.items():
            value = getattr(self, name)
            if value is not None and len(value) != length:
                raise _invalid(
                    name, f"{len(value)} entries; {length} fit {n} rows and {e} dependencies"
                )
        self._check_offsets("dep_offsets", self.dep_offsets, e)
        if self.wait_offsets is not None and self.wait_rows is not None:
            self._check_offsets("wait_offsets", self.wait_offsets, len(self.wait_rows))

    def _check_offsets(self, name: str, offsets: Int64Array, last: int) -> None:
        if offsets[0] != 0 or offsets[-1] != last:
            raise _invalid(
                name, f"must run from 0 to {last}, not from {offsets[0]} to {offsets[-1]}"
            )
        if (offsets[1:] < offsets[:-1]).any():
            row = int((offsets[1:] < offsets[:-1]).argmax())
            raise _invalid(name, f"decreases at {self.label(row)}")

    def _check_ranges(self) -> None:
        bad = _first_outside(self.dep_rows, 0, self.rows)
        if bad is not None:
            row = int(np.searchsorted(self.dep_offsets, bad, side="right")) - 1
            raise _invalid(
                "dep_rows",
                f"{self.label(row)} depends on row {self.dep_rows[bad]} of {self.rows}",
            )
        bad = _first_outside(self.instance, -1, self.instances)
        if bad is not None:
            raise _invalid(
                "instance",
                f"{self.label(bad)} is in sync instance {self.instance[bad]} of {self.instances}",
            )
        if self.wait_rows is None or self.wait_offsets is None:
            return
        bad = _first_outside(self.wait_rows, 0, self.rows)
        if bad is not None:
            raise _invalid("wait_rows", f"a row waits for row {self.wait_rows[bad]} of {self.rows}")
        both = (np.diff(self.wait_offsets) > 0) & (self.instance >= 0)
        if both.any():
            raise _invalid(
                "wait_rows",
                f"{self.label(int(both.argmax()))} waits as a member of a sync instance "
                "and by wait_rows",
            )

    def _check_signs(self) -> None:
        bad = _first_below(self.duration_ns, 0)
        if bad is not None:
            raise _invalid("duration_ns", f"{self.label(bad)} lasts {self.duration_ns[bad]} ns")
        if self.dep_lag_ns is not None:
            bad = _first_below(self.dep_lag_ns, 0)
            if bad is not None:
                row = int(np.searchsorted(self.dep_offsets, bad, side="right")) - 1
                raise _invalid(
                    "dep_lag_ns", f"{self.label(row)} has the lag {self.dep_lag_ns[bad]} ns"
                )
        total = float(self.duration_ns.sum(dtype=np.float64)) + self.idle_ns
        if total >= MAX_TOTAL_NS:
            raise _invalid("duration_ns", f"all times together, {total:.3g} ns, overflow int64")

    def _check_members(self) -> None:
        bad = _first_below(self.instance_size, 1)
        if bad is not None:
            size = self.instance_size[bad]
            raise _invalid("instance_size", f"sync instance {bad} expects {size} members")
        surplus = self.members_present > self.instance_size
        if surplus.any():
            bad = int(surplus.argmax())
            rows = np.flatnonzero(self.instance == bad)
            raise _invalid(
                "instance",
                f"sync instance {bad} has {len(rows)} members but expects "
                f"{self.instance_size[bad]}: {', '.join(self.label(row) for row in rows[:16])}",
                hint="a rank is in it twice, or two operations got one group and seq",
            )


_COLUMNS: dict[str, type[np.signedinteger[Any]]] = {
    "duration_ns": np.int64,
    "dep_offsets": np.int64,
    "dep_rows": np.int32,
    "instance": np.int32,
    "instance_size": np.int32,
    "dep_lag_ns": np.int64,
    "release_ns": np.int64,
    "wait_offsets": np.int64,
    "wait_rows": np.int32,
}


def _column(name: str, value: ArrayLike, dtype: type[np.signedinteger[Any]]) -> NDArray[Any]:
    """The values as a contiguous, read-only array of the dtype, copied only if needed."""
    array = np.asarray(value)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise _invalid(name, f"needs integers in one dimension, not {array.dtype}{array.shape}")
    if not np.can_cast(array.dtype, dtype) and array.size:
        limits = np.iinfo(dtype)
        if int(array.min()) < limits.min or int(array.max()) > limits.max:
            raise _invalid(name, f"values do not fit {np.dtype(dtype)}")
    view = np.ascontiguousarray(array, dtype).view()
    # Engines compile once per combination of dtypes and writability: keep one combination.
    view.flags.writeable = False
    return view


def _ints(values: ArrayLike) -> Int64Array:
    # An empty list would become float64.
    return np.asarray(values, np.int64)


def _first_outside(array: NDArray[Any], low: int, high: int) -> int | None:
    """Index of the first value outside [low, high)."""
    if not array.size or (array.min() >= low and array.max() < high):
        return None
    return int(((array < low) | (array >= high)).argmax())


def _first_below(array: NDArray[Any], low: int) -> int | None:
    """Index of the first value below low."""
    if not array.size or array.min() >= low:
        return None
    return int((array < low).argmax())


def _invalid(attribute: str, problem: str, hint: str | None = None) -> CalibError:
    return CalibError(f"invalid graph: {problem}", where=f"Graph.{attribute}", hint=hint)
