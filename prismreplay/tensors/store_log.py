"""What the ranks of a job did with its key-value store, written down and played again.

A recording holds it beside the tensors. In a run with virtual ranks, whatever those had set by the
time of a sandbox rank's operation is set before it: keys appear and counters stand as they did.
"""

from __future__ import annotations

import base64
import json
from collections import defaultdict, deque
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from prismreplay.errors import TensorRecordingError
from prismtrace.output import atomic_output

__all__ = ["FILE", "StoreEntry", "StoreReplay", "read_store_log", "write_store_log"]

FILE = "store.jsonl"
_CHANGING = frozenset({"set", "add", "compare_set", "delete", "append", "queue_push", "queue_pop"})


class StoreEntry(NamedTuple):
    """An operation that was done, as `prismreplay.runtime.stores.StoreClient` lists them."""

    rank: int
    operation: str
    arguments: tuple[Any, ...]


def write_store_log(folder: Path, entries: Sequence[StoreEntry]) -> None:
    """Write operations in the order in which they were done.

    Raises:
        OutputError: the disk is full.
    """
    with atomic_output(folder / FILE) as path, path.open("w", encoding="utf-8") as file:
        for rank, operation, arguments in entries:
            file.write(json.dumps([rank, operation, [_plain(one) for one in arguments]]) + "\n")


def read_store_log(folder: Path) -> tuple[StoreEntry, ...]:
    """Read what `write_store_log` wrote; nothing where there is no such file.

    Raises:
        TensorRecordingError: it is damaged.
    """
    path = folder / FILE
    if not path.is_file():
        return ()
    try:
        with path.open(encoding="utf-8") as file:
            rows = [json.loads(line) for line in file]
        return tuple(
            StoreEntry(int(rank), str(operation), tuple(_original(one) for one in arguments))
            for rank, operation, arguments in rows
        )
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise TensorRecordingError(
            f"the log of the key-value store is damaged: {error}",
            where=str(path),
            hint="record the tensors again: prismreplay collect --record-tensors",
        ) from error


def _plain(value: Any) -> Any:
    return {"bytes": base64.b64encode(value).decode()} if isinstance(value, bytes) else value


def _original(value: Any) -> Any:
    return base64.b64decode(value["bytes"]) if isinstance(value, dict) else value


class StoreReplay:
    """Plays what virtual ranks did with the store.

    Args:
        entries: of all ranks, in their order.
        sandbox: ranks that do it themselves.
    """

    def __init__(self, entries: Sequence[StoreEntry], sandbox: Collection[int]) -> None:
        self._entries = entries
        self._sandbox = frozenset(sandbox)
        self._next = 0
        self._places: dict[tuple[int, str, str], deque[int]] = defaultdict(deque)
        for place, entry in enumerate(entries):
            if entry.rank in self._sandbox:
                self._places[_name(*entry)].append(place)

    def before(self, rank: int, operation: str, arguments: tuple[Any, ...]) -> Iterator[StoreEntry]:
        """What virtual ranks did before this operation of a sandbox rank, each once.

        Of an operation that the recording does not have, everything.
        """
        places = self._places[_name(rank, operation, arguments)]
        end = places.popleft() if places else len(self._entries)
        while self._next < end:
            entry = self._entries[self._next]
            self._next += 1
            if entry.rank not in self._sandbox and entry.operation in _CHANGING:
                yield entry


def _name(rank: int, operation: str, arguments: tuple[Any, ...]) -> tuple[int, str, str]:
    return rank, operation, str(arguments[0]) if arguments else ""
