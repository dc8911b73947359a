"""Key-value stores over a client: torch's interface, prefixes, namespaces, the program's own."""

from __future__ import annotations

from datetime import timedelta

import pytest

torch = pytest.importorskip("torch", reason="needs the extra `replay`")

import torch.distributed as dist  # noqa: E402

from prismreplay.runtime.stores import PrefixStore, RemoteStore, keyed_by  # noqa: E402


class Table:
    """A client whose keys are here; nothing blocks."""

    def __init__(self):
        self.values, self.queues, self.waited = {}, {}, []

    def call(self, operation, *arguments):
        return getattr(self, operation)(*arguments)

    def set(self, key, value):
        self.values[key] = value

    def get(self, key, seconds):
        self.waited.append(seconds)
        return self.values[key]

    def add(self, key, amount):
        self.values[key] = b"%d" % (int(self.values.get(key, b"0")) + amount)
        return int(self.values[key])

    def compare_set(self, key, expected, desired):
        if self.values.get(key, b"") == expected:
            self.values[key] = desired
        return self.values.get(key, expected)

    def check(self, keys):
        return all(key in self.values for key in keys)

    def wait(self, keys, seconds):
        self.waited.append(seconds)
        if not self.check(keys):
            raise dist.DistStoreError(str(keys))

    def delete(self, key):
        return self.values.pop(key, None) is not None

    def append(self, key, value):
        self.values[key] = self.values.get(key, b"") + value

    def keys(self, prefix):
        return [key for key in self.values if key.startswith(prefix)]

    def queue_push(self, key, value):
        self.queues.setdefault(key, []).append(value)

    def queue_pop(self, key, *_how):
        return self.queues[key].pop(0)

    def queue_length(self, key):
        return len(self.queues.get(key, []))


def exercise(store):
    """The same on every store; what it returned."""
    store.set("a", "one")
    store.append("a", "!")
    store.multi_set(["b", "c"], ["two", b"three"])
    store.wait(["a", "b"])
    store.wait(["a"], timedelta(seconds=1))
    return [
        store.get("a"),
        store.multi_get(["b", "c"]),
        store.add("n", 2) + store.add("n", 3),
        store.get("n"),
        store.check(["a", "b"]),
        store.check(["nothing"]),
        store.compare_set("a", "one!", "four"),
        store.compare_set("a", "no", "five"),
        store.compare_set("new", "", "first"),
        store.compare_set("absent", "expected", "x"),
        store.delete_key("b"),
        store.delete_key("b"),
    ]


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_stores_answer_as_torchs_do(depth):
    ours, theirs = RemoteStore(Table(), "space"), dist.HashStore()
    for index in range(depth):
        ours, theirs = PrefixStore(f"p{index}", ours), dist.PrefixStore(f"p{index}", theirs)
    assert exercise(ours) == exercise(theirs)
    assert sorted(ours.list_keys()) == ["a", "c", "n", "new"]
    assert ours.num_keys() == 4
    ours.queue_push("q", "x")
    assert (ours.queue_len("q"), ours.queue_pop("q"), ours.queue_len("q")) == (1, b"x", 0)


def test_prefixes_over_a_store_of_torchs():
    store = dist.HashStore()
    exercise(PrefixStore("p", PrefixStore("q", store)))
    assert store.get("q/p/a") == b"four"


def test_namespaces_have_keys_of_their_own():
    table = Table()
    one, two = RemoteStore(table, "one"), RemoteStore(table, "two")
    one.set("key", "1")
    assert not two.check(["key"])
    assert one.clone().get("key") == b"1"
    assert PrefixStore("p", one).clone().num_keys() == 0


def test_timeouts_reach_the_client():
    table = Table()
    store = PrefixStore("p", RemoteStore(table))
    store.set_timeout(timedelta(seconds=7))
    store.set("a", "x")
    store.get("a")
    store.wait(["a"])
    store.wait(["a"], timedelta(seconds=2))
    assert (table.waited, store.timeout) == ([7.0, 7.0, 2.0], timedelta(seconds=7))
    with pytest.raises(dist.DistStoreError):
        store.wait(["nothing"])


def test_stores_that_programs_make_share_keys_by_address():
    table = Table()
    stores = keyed_by(lambda namespace: RemoteStore(table, namespace), "tcp", dist.TCPStore)
    server = stores("localhost", 0, 2, is_master=True)
    client = stores(host_name="localhost", port=server.port, world_size=2)
    server.set("a", "x")
    assert client.get("a") == b"x"
    assert not stores("localhost", 1).check(["a"])
    assert stores.__name__ == "TCPStore"
    files = keyed_by(lambda namespace: RemoteStore(table, namespace), "file", dist.FileStore)
    files("/some/where", 2).set("b", "y")
    assert files("/some/where", 2).get("b") == b"y"


def test_barrier():
    store = RemoteStore(Table())
    with pytest.raises(dist.DistStoreError):
        store.barrier("all", 2)
    store.barrier("all", 2)
