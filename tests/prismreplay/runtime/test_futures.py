"""Futures that whoever waits for them completes."""

from __future__ import annotations

from contextlib import contextmanager

import pytest

torch = pytest.importorskip("torch", reason="needs the extra `replay`")

from prismreplay.runtime.futures import FutureQueue, PendingFuture, gather_futures  # noqa: E402


def later(value, log):
    """A future of `value`; `log` learns when it was waited for."""

    def finish():
        log.append(value)
        future.complete([torch.tensor(value)])

    future = PendingFuture(finish)
    return future


def test_waiting_completes():
    log = []
    future = later(3, log)
    assert not future.done()
    assert log == []
    assert future.wait()[0] == 3
    assert future.value()[0] == 3
    assert future.done()
    assert log == [3]


def test_chains_run_once_and_lazily():
    log = []
    future = later(3, log)
    child = future.then(lambda done: done.value()[0] * 2).then(lambda done: done.value() + 1)
    called = []
    future.add_done_callback(called.append)
    assert (log, called) == ([], [])
    assert child.wait() == 7
    assert (log, called) == ([3], [future])
    assert future.then(lambda _: "at once").value() == "at once"


def test_errors_reach_whoever_waits():
    log = []
    child = later(3, log).then(lambda _: 1 / 0)
    with pytest.raises(Exception, match="division by zero"):
        child.wait()


def test_native_futures_chained_to_ours_are_completed():
    log = []
    future = later(3, log)
    native = torch._C._collect_all([future])
    future.finish()
    assert native.done()


def test_gathered_futures_wait_for_all():
    log = []
    gathered = gather_futures([later(1, log), later(2, log)])
    assert log == []
    assert [future.value()[0].item() for future in gathered.wait()] == [1, 2]
    assert log == [1, 2]
    assert gather_futures([torch.futures.Future()]) is None


def test_waits_with_something_attached_are_not_together():
    log = []

    @contextmanager
    def together():
        log.append("(")
        yield
        log.append(")")

    queue = FutureQueue(together)
    futures = [later(number, log) for number in range(5)]
    futures[2].then(lambda _: log.append("then"))
    queue._waiting += futures
    queue.finish_all()
    assert log == ["(", 0, 1, ")", 2, "then", "(", 3, 4, ")"]


def test_backward_waits_at_its_end_in_order():
    log, queue = [], FutureQueue()
    weight = torch.ones(1, requires_grad=True)
    output = weight
    for number in (2, 1):
        output = output * 1.0

        def hook(_gradient, number=number):
            queue.hand_out(later(number, log))
            log.append(f"hook {number}")

        output.register_hook(hook)
    output.sum().backward()
    assert log == ["hook 1", "hook 2", 1, 2]


def test_outside_of_backward_nothing_is_kept():
    log, queue = [], FutureQueue()
    queue.hand_out(later(1, log))
    queue.finish_all()
    assert log == []


def test_what_cpp_makes_of_ours_can_be_waited_for():
    log, queue = [], FutureQueue()

    def make():
        future = later(5, log)
        queue.hand_out(future)
        return torch._C._collect_all([future])

    made = queue.collect(make)
    assert log == []
    assert made.wait()[0].value()[0] == 5
    assert log == [5]
