"""The key-value store of a run, which lives in the coordinator. No input or output in here.

Operations are those that `prismreplay.runtime.stores.StoreClient` lists. One that cannot be done
yet (a key that is not set, an empty queue) blocks its rank until another rank makes it possible.
"""

from __future__ import annotations

from collections import defaultdict, deque
from typing import Any

__all__ = ["KeyValueStore", "NotYet", "StoreFailure", "awaited_keys", "patience"]


class NotYet(Exception):  # noqa: N818  no error: the rank waits
    """The operation must wait for another rank."""


class StoreFailure(Exception):  # noqa: N818  it becomes an error in the rank
    """The operation can never be done; the message goes to the program."""


_CHANGING = frozenset({"set", "add", "compare_set", "append", "queue_push"})


class KeyValueStore:
    """Values and queues by key."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._queues: dict[str, deque[bytes]] = defaultdict(deque)

    def perform(self, op: str, args: tuple[Any, ...]) -> Any:
        """Do `op`, one of the methods below without its underscore.

        Raises:
            NotYet: it has to wait.
            StoreFailure: it cannot be done at all.
        """
        method = getattr(self, f"_{op}", None)
        if method is None:
            raise StoreFailure(f"the store has no operation {op!r}")
        return method(*args)

    @staticmethod
    def changes(op: str) -> bool:
        """Whether others may be able to go on after `op`."""
        return op in _CHANGING

    def _set(self, key: str, value: bytes) -> None:
        self._values[key] = value

    def _get(self, key: str, _seconds: float) -> bytes:
        try:
            return self._values[key]
        except KeyError:
            raise NotYet from None

    def _add(self, key: str, amount: int) -> int:
        try:
            total = int(self._values.get(key, b"0")) + amount
        except ValueError:
            raise StoreFailure(f"the value of {key!r} is not a number") from None
        self._values[key] = str(total).encode()
        return total

    def _check(self, keys: list[str]) -> bool:
        return all(key in self._values or self._queues.get(key) for key in keys)

    def _wait(self, keys: list[str], _seconds: float) -> None:
        if not self._check(keys):
            raise NotYet

    def _delete(self, key: str) -> bool:
        return self._values.pop(key, None) is not None

    def _keys(self, prefix: str) -> list[str]:
        return [key for key in self._values if key.startswith(prefix)]

    def _compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        found = self._values.get(key)
        if found is None and expected:
            return expected
        if found in (None, expected):
            self._values[key] = desired
            return desired
        return found or b""

    def _append(self, key: str, value: bytes) -> None:
        self._values[key] = self._values.get(key, b"") + value

    def _queue_push(self, key: str, value: bytes) -> None:
        self._queues[key].append(value)

    def _queue_pop(self, key: str, block: bool, _seconds: float) -> bytes:
        queue = self._queues[key]
        if queue:
            return queue.popleft()
        if block:
            raise NotYet
        raise StoreFailure(f"the queue {key!r} is empty")

    def _queue_length(self, key: str) -> int:
        return len(self._queues[key])


def awaited_keys(args: tuple[Any, ...]) -> list[str]:
    """The keys that a blocked operation waits for."""
    return [args[0]] if isinstance(args[0], str) else list(args[0])


def patience(args: tuple[Any, ...]) -> float:
    """Seconds that a blocked operation may wait, as the program says."""
    return float(args[-1])
