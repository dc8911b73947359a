from __future__ import annotations

import os

import pytest

from prismreplay.collect import watching
from prismreplay.collect.watching import IdleWatch, MemoryWatch, cpu_seconds


def test_a_rank_without_processor_time_is_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    used = {7: 0.0, 8: 0.0}
    monkeypatch.setattr(watching, "cpu_seconds", used.__getitem__)
    watch = IdleWatch(patience=2.0)
    running = [(0, 7), (1, 8)]
    assert watch.idle(running, 0.0) == []
    used[8] = 1.0
    assert watch.idle(running, 1.5) == []
    used[8] = 2.0
    assert watch.idle(running, 2.5) == [0]
    watch.forget(0)
    assert watch.idle(running, 3.0) == []


def test_memory_is_sampled_now_and_then() -> None:
    watch = MemoryWatch()
    watch.sample([os.getpid()], now=1.0)
    first = watch.peak_bytes
    assert first > 1 << 20
    watch.sample([], now=1.1)
    assert watch.peak_bytes == first


def test_a_process_that_is_gone_uses_nothing() -> None:
    assert cpu_seconds(2**22 + 1) == 0.0
