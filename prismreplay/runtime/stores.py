"""Key-value stores (`torch.distributed.Store`) that live in the run's coordinator.

torch's own stores talk over TCP and block in C++, where a coordinator cannot see who waits for
whom. These are Python: a rank's store calls go through a `StoreClient`. `PrefixStore` is torch's
wrapper written anew, since the C++ one cannot call a Python store's `wait`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

from torch import distributed

__all__ = ["PrefixStore", "RemoteStore", "StoreClient", "keyed_by"]

DEFAULT_TIMEOUT = timedelta(minutes=30)


class StoreClient(Protocol):
    """Carries a rank's store calls to where the keys are.

    Values are bytes. Operations and what they return:

    =======================================  ====================================================
    set(key, value)                          None
    get(key, seconds)                        the value; blocks until the key exists
    add(key, amount)                         the new number (kept as decimal digits), int
    compare_set(key, expected, desired)      the value afterwards; sets `desired` if the key holds
                                             `expected`, or does not exist and `expected` is empty;
                                             a key that does not exist otherwise gives `expected`
    check(keys)                              True if all exist
    wait(keys, seconds)                      None; blocks until all exist
    delete(key)                              True if it existed
    append(key, value)                       None
    keys(prefix)                             all keys that begin so
    queue_push(key, value)                   None
    queue_pop(key, block, seconds)           the oldest value; blocks until there is one if `block`
    queue_length(key)                        int
    =======================================  ====================================================

    A call that blocks longer than `seconds` raises `torch.distributed.DistStoreError`.
    """

    def call(self, operation: str, *arguments: Any) -> Any:
        """Perform one of the operations above."""


class _Store(distributed.Store):  # type: ignore[misc]
    """What all stores here share: everything torch offers, on top of `_do`."""

    def __init__(self) -> None:
        super().__init__()
        self._limit = DEFAULT_TIMEOUT

    def _do(self, operation: str, *arguments: Any) -> Any:
        """Perform an operation; keys are whole, as `_key` gives them."""
        raise NotImplementedError

    def _key(self, key: str) -> str:
        """The key as the store at the bottom knows it."""
        raise NotImplementedError

    def set(self, key: str, value: str | bytes) -> None:
        """Set a key."""
        self._do("set", self._key(key), _encoded(value))

    def get(self, key: str) -> bytes:
        """The value; blocks until the key exists."""
        value: bytes = self._do("get", self._key(key), self._limit.total_seconds())
        return value

    def add(self, key: str, amount: int) -> int:
        """Add to a counter; gives the new number."""
        return int(self._do("add", self._key(key), amount))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Set if it holds what is expected; gives the value afterwards."""
        value: bytes = self._do(
            "compare_set", self._key(key), _encoded(expected), _encoded(desired)
        )
        return value

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys exist."""
        return bool(self._do("check", [self._key(key) for key in keys]))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Block until all keys exist."""
        limit = self._limit if timeout is None else timeout
        self._do("wait", [self._key(key) for key in keys], limit.total_seconds())

    def delete_key(self, key: str) -> bool:
        """Remove a key; whether it existed."""
        return bool(self._do("delete", self._key(key)))

    def append(self, key: str, value: str | bytes) -> None:
        """Append to a key's value."""
        self._do("append", self._key(key), _encoded(value))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """The values of several keys; blocks until all exist."""
        return [self.get(key) for key in keys]

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Set several keys."""
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def list_keys(self) -> list[str]:
        """All keys."""
        start = self._key("")
        return [key.removeprefix(start) for key in self._do("keys", start)]

    def num_keys(self) -> int:
        """Number of keys."""
        return len(self._do("keys", self._key("")))

    def queue_push(self, key: str, value: str | bytes) -> None:
        """Append to a queue."""
        self._do("queue_push", self._key(key), _encoded(value))

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        """Take the oldest value out of a queue."""
        value: bytes = self._do("queue_pop", self._key(key), block, self._limit.total_seconds())
        return value

    def queue_len(self, key: str) -> int:
        """Values in a queue."""
        return int(self._do("queue_length", self._key(key)))

    def barrier(
        self, key: str, world_size: int, timeout: timedelta | None = None, **_more: Any
    ) -> None:
        """Block until `world_size` callers are here."""
        if self.add(f"{key}/arrived", 1) == world_size:
            self.set(f"{key}/all", b"1")
        self.wait([f"{key}/all"], timeout)

    def has_extended_api(self) -> bool:
        """True: append, multi_get and multi_set are there."""
        return True

    def set_timeout(self, timeout: timedelta) -> None:
        """How long `get` and `wait` block."""
        self._limit = timeout

    @property
    def timeout(self) -> timedelta:
        """How long `get` and `wait` block."""
        return self._limit


class RemoteStore(_Store):
    """The keys of one namespace, through a client. Stores of a namespace share their keys."""

    def __init__(self, client: StoreClient, namespace: str = "") -> None:
        super().__init__()
        self._client = client
        self._namespace = namespace

    def _key(self, key: str) -> str:
        return f"{self._namespace}|{key}"

    def _do(self, operation: str, *arguments: Any) -> Any:
        return self._client.call(operation, *arguments)

    def clone(self) -> RemoteStore:
        """Another handle on the same keys."""
        return RemoteStore(self._client, self._namespace)


class PrefixStore(_Store):
    """A store whose keys all begin with a prefix; over a store of ours or one of torch's."""

    def __init__(self, prefix: str, store: Any) -> None:
        super().__init__()
        self._prefix = prefix
        self.underlying_store = store
        self._limit = store.timeout

    @property
    def _underlying_non_prefix_store(self) -> Any:
        store = self.underlying_store
        return store._underlying_non_prefix_store if isinstance(store, PrefixStore) else store  # noqa: SLF001

    def _key(self, key: str) -> str:
        store, below = self.underlying_store, f"{self._prefix}/{key}"
        return store._key(below) if isinstance(store, _Store) else below  # noqa: SLF001

    def _do(self, operation: str, *arguments: Any) -> Any:
        store = self.underlying_store
        if isinstance(store, _Store):
            return store._do(operation, *arguments)  # noqa: SLF001
        return _on_native(store, operation, arguments)

    def set_timeout(self, timeout: timedelta) -> None:
        """How long `get` and `wait` block, here and in the store below."""
        super().set_timeout(timeout)
        self.underlying_store.set_timeout(timeout)

    def clone(self) -> PrefixStore:
        """Another handle on the same keys."""
        return PrefixStore(self._prefix, self.underlying_store.clone())


def keyed_by(make_store: Callable[[str], Any], kind: str, original: type) -> type:
    """A class that a program may construct like `original` (TCPStore or FileStore).

    Args:
        make_store: gives the store of a namespace (`Role.make_store`).
        kind: ``tcp`` or ``file``, the first part of the namespace.
        original: torch's class, for its name.
    """

    class ProgramStore(_Store):
        def __init__(self, *arguments: Any, **keywords: Any) -> None:
            super().__init__()
            names = ("host_name", "port") if kind == "tcp" else ("file_name",)
            given = {**dict(zip(names, arguments, strict=False)), **keywords}
            if kind == "tcp":
                self.host = given["host_name"]
                # Port 0 asks for a free one; nothing listens, so any number will do.
                self.port = given["port"] or 1 << 16 | make_store("tcp").add("free port", 1)
            self._below = make_store(f"{kind}:{self.port if kind == 'tcp' else given[names[0]]}")
            self._limit = keywords.get("timeout") or DEFAULT_TIMEOUT

        def _key(self, key: str) -> str:
            return str(self._below._key(key))  # noqa: SLF001

        def _do(self, operation: str, *arguments: Any) -> Any:
            return self._below._do(operation, *arguments)  # noqa: SLF001

        def clone(self) -> Any:
            return self._below.clone()

    ProgramStore.__name__ = ProgramStore.__qualname__ = original.__name__
    return ProgramStore


def _encoded(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


def _on_native(store: Any, operation: str, arguments: tuple[Any, ...]) -> Any:
    """Perform an operation of ours on one of torch's stores."""
    first, *rest = arguments
    if operation == "get":
        return store.get(first)
    if operation == "wait":
        return store.wait(first, timedelta(seconds=rest[0]))
    if operation == "delete":
        return store.delete_key(first)
    if operation == "keys":
        return [key for key in store.list_keys() if key.startswith(first)]
    if operation == "queue_pop":
        return store.queue_pop(first, rest[0])
    if operation == "queue_length":
        return store.queue_len(first)
    return getattr(store, operation)(first, *rest)
