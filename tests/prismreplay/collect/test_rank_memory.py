from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest
import torch

from prismreplay.collect.rank_memory import RankMemory, page_out, swap_space

GIB = 1 << 30


class Allocator:
    """torch.cuda's, as far as it is asked."""

    def __init__(self) -> None:
        self.reserved, self.allocated, self.peak = 0, 0, 0
        self.emptied = 0

    def is_initialized(self):
        return self.reserved > 0

    def memory_stats_as_nested_dict(self):
        if not self.reserved:
            return {}
        reserved = {"current": self.reserved, "peak": self.peak}
        return {
            "reserved_bytes": {"all": reserved},
            "allocated_bytes": {"all": {"current": self.allocated}},
        }

    def synchronize(self):
        pass

    def empty_cache(self):
        self.emptied += 1
        self.reserved = self.allocated


@pytest.fixture
def allocator(monkeypatch):
    fake = Allocator()
    for name in ("is_initialized", "memory_stats_as_nested_dict", "synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, getattr(fake, name))
    return fake


def test_memory_is_told_when_it_has_changed_much(allocator):
    memory = RankMemory()
    assert memory.note() is None
    allocator.reserved = allocator.allocated = allocator.peak = GIB
    assert memory.note() == ("memory", GIB, GIB, GIB)
    assert memory.note() is None
    allocator.allocated -= 1 << 20
    assert memory.note() is None
    allocator.peak = 2 * GIB
    assert memory.note() == ("memory", GIB, GIB - (1 << 20), 2 * GIB)


def test_trimming_gives_back_what_is_not_allocated(allocator):
    memory = RankMemory()
    assert memory.trim() == ("trimmed", 0, 0, 0)
    assert allocator.emptied == 0
    allocator.reserved, allocator.allocated, allocator.peak = 3 * GIB, GIB, 4 * GIB
    assert memory.trim() == ("trimmed", GIB, GIB, 4 * GIB)
    assert memory.note() is None


def test_only_private_memory_is_paged_out():
    buffer = (ctypes.c_char * (4 << 20))()
    told = []
    total = page_out(lambda start, size: told.append((start, size)) is None)
    assert total == sum(size for _, size in told)
    address = ctypes.addressof(buffer)
    assert any(start <= address < start + size for start, size in told)
    code = ctypes.cast(ctypes.CDLL(None).getpid, ctypes.c_void_p).value
    assert not any(start <= code < start + size for start, size in told)


def test_a_process_lives_on_after_it_was_paged_out():
    program = (
        "from prismreplay.collect.rank_memory import page_out\n"
        "kept = list(range(100_000)); assert page_out() > 0; print(sum(kept))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.stdout == f"{sum(range(100_000))}\n", done.stderr


def test_swap_space_of_this_machine():
    assert swap_space() >= 0
