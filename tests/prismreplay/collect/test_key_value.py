from __future__ import annotations

import pytest

from prismreplay.collect.key_value import KeyValueStore, NotYet, StoreFailure


def test_values() -> None:
    store = KeyValueStore()
    with pytest.raises(NotYet):
        store.perform("get", ("a", 1.0))
    store.perform("set", ("a", b"1"))
    assert store.perform("get", ("a", 1.0)) == b"1"
    assert store.perform("add", ("a", 4)) == 5
    assert store.perform("add", ("new", 2)) == 2
    store.perform("append", ("text", b"x"))
    store.perform("append", ("text", b"y"))
    assert store.perform("get", ("text", 1.0)) == b"xy"
    with pytest.raises(StoreFailure, match="not a number"):
        store.perform("add", ("text", 1))
    assert store.perform("keys", ("t",)) == ["text"]
    assert store.perform("check", (["a", "text"],))
    assert not store.perform("check", (["a", "b"],))
    with pytest.raises(NotYet):
        store.perform("wait", (["a", "b"], 1.0))
    assert store.perform("delete", ("a",))
    assert not store.perform("delete", ("a",))


def test_compare_set() -> None:
    store = KeyValueStore()
    assert store.perform("compare_set", ("k", b"old", b"new")) == b"old"
    assert store.perform("compare_set", ("k", b"", b"first")) == b"first"
    assert store.perform("compare_set", ("k", b"other", b"new")) == b"first"
    assert store.perform("compare_set", ("k", b"first", b"new")) == b"new"


def test_queues() -> None:
    store = KeyValueStore()
    with pytest.raises(NotYet):
        store.perform("queue_pop", ("q", True, 1.0))
    with pytest.raises(StoreFailure):
        store.perform("queue_pop", ("q", False, 1.0))
    store.perform("queue_push", ("q", b"1"))
    store.perform("queue_push", ("q", b"2"))
    assert store.perform("queue_length", ("q",)) == 2
    assert store.perform("queue_pop", ("q", True, 1.0)) == b"1"


def test_an_operation_that_is_not_there() -> None:
    with pytest.raises(StoreFailure, match="no operation 'watch'"):
        KeyValueStore().perform("watch", ("k",))
