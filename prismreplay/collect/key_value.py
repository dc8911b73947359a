"""The key-value store of a run, which lives in the coordinator. No input or output in here.

Operations are those of torch's TCPStore. One that cannot be done yet (a key that is not set, an
empty queue) blocks its rank until another rank makes it possible.
"""

from __future__ import annotations

from collections import defaultdict, deque
from typing import Any

__all__ = ["NotYet", "Store", "StoreFailure", "awaited_keys"]


class NotYet(Exception):
    """The operation must wait for another rank."""


class StoreFailure(Exception):
    """The operation can never be done; the message goes to the program."""


_CHANGING = frozenset(
    {"set", "add", "compare_set", "append", "queue_push", "multi_set", "delete_key"}
)


class Store:
    """All namespaces of a run."""

    def __init__(self) -> None:
        self._values: dict[str, dict[str, bytes]] = defaultdict(dict)
        self._queues: dict[tuple[str, str], deque[bytes]] = defaultdict(deque)

    def perform(self, namespace: str, op: str, args: tuple[Any, ...]) -> Any:
        """Do `op`, one of the methods below without its underscore.

        Raises:
            NotYet: it has to wait.
            StoreFailure: it cannot be done at all.
        """
        method = getattr(self, f"_{op}", None)
        if method is None:
            raise StoreFailure(f"the store has no operation {op!r}")
        return method(namespace, *args)

    @staticmethod
    def changes(op: str) -> bool:
        """Whether others may be able to go on after `op`."""
        return op in _CHANGING

    def _set(self, space: str, key: str, value: bytes) -> None:
        self._values[space][key] = value

    def _get(self, space: str, key: str) -> bytes:
        try:
            return self._values[space][key]
        except KeyError:
            raise NotYet from None

    def _add(self, space: str, key: str, amount: int) -> int:
        try:
            total = int(self._values[space].get(key, b"0")) + amount
        except ValueError:
            raise StoreFailure(f"the value of {key!r} is not a number") from None
        self._values[space][key] = str(total).encode()
        return total

    def _check(self, space: str, keys: list[str]) -> bool:
        return all(key in self._values[space] or self._queues.get((space, key)) for key in keys)

    def _wait(self, space: str, keys: list[str]) -> None:
        if not self._check(space, keys):
            raise NotYet

    def _delete_key(self, space: str, key: str) -> bool:
        return self._values[space].pop(key, None) is not None

    def _num_keys(self, space: str) -> int:
        return len(self._values[space])

    def _list_keys(self, space: str) -> list[str]:
        return list(self._values[space])

    def _compare_set(self, space: str, key: str, expected: bytes, desired: bytes) -> bytes:
        found = self._values[space].get(key)
        if found is None:
            if expected:
                return expected
            self._values[space][key] = desired
            return desired
        if found == expected:
            self._values[space][key] = desired
            return desired
        return found

    def _append(self, space: str, key: str, value: bytes) -> None:
        self._values[space][key] = self._values[space].get(key, b"") + value

    def _multi_get(self, space: str, keys: list[str]) -> list[bytes]:
        return [self._get(space, key) for key in keys]

    def _multi_set(self, space: str, keys: list[str], values: list[bytes]) -> None:
        self._values[space].update(zip(keys, values, strict=True))

    def _queue_push(self, space: str, key: str, value: bytes) -> None:
        self._queues[space, key].append(value)

    def _queue_pop(self, space: str, key: str, block: bool = True) -> bytes:
        queue = self._queues[space, key]
        if queue:
            return queue.popleft()
        if block:
            raise NotYet
        raise StoreFailure(f"the queue {key!r} is empty")

    def _queue_len(self, space: str, key: str) -> int:
        return len(self._queues[space, key])


def awaited_keys(op: str, args: tuple[Any, ...]) -> list[str]:
    """The keys that a blocked operation waits for."""
    if not args:
        return []
    return [args[0]] if isinstance(args[0], str) else list(args[0])
