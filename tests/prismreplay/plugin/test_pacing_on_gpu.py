"""Kernels that keep a stream busy for as long as a piece of it would take longer."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="needs the extra `cuda`")

pytestmark = pytest.mark.gpu

SLEEP = 2_000_000


@pytest.fixture
def stretcher():
    from prismreplay.plugin.pacing import Stretcher

    torch.cuda.init()
    made = Stretcher()
    yield made
    torch.cuda.synchronize()
    made.close()


def milliseconds(*works):
    """What a stream takes for each of some works, in turn: others may use the GPU, its clock moves."""
    least = [float("inf")] * len(works)
    for _ in range(10):
        for place, work in enumerate(works):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            work()
            end.record()
            torch.cuda.synchronize()
            least[place] = min(least[place], begin.elapsed_time(end))
    return least


@pytest.mark.parametrize("factor", [1.0, 1.5, 4.0])
def test_a_piece_takes_so_many_times_as_long(stretcher, factor):
    stream = torch.cuda.current_stream().cuda_stream

    def piece():
        note = stretcher.note(stream)
        torch.cuda._sleep(SLEEP)
        stretcher.stretch(note, factor - 1, stream)

    plain, paced = milliseconds(lambda: torch.cuda._sleep(SLEEP), piece)
    assert paced == pytest.approx(factor * plain, rel=0.05, abs=0.03)


def test_memory_of_torch_stays_as_it_is(stretcher):
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        note = stretcher.note(stream.cuda_stream)
        stretcher.stretch(note, 2.0, stream.cuda_stream)
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() == before


def test_a_faster_piece_is_owed():
    from prismreplay.plugin.advancing import Advancer

    torch.cuda.init()
    advancer = Advancer(None)
    stream = torch.cuda.current_stream().cuda_stream
    for _ in range(2):
        first = advancer.launch(None, stream)
        begin = advancer.arrive(None, stream)
        torch.cuda._sleep(SLEEP)
        end = advancer.arrive(None, stream)
        advancer.owe(begin, end, 0.75, stream)
        last = advancer.launch(None, stream)
        torch.cuda.synchronize()
        arrivals = {one.ticket: one.arrival_ns for one in advancer.records()}
    passed_ns = arrivals[last] - arrivals[first]
    plain_ns = 1e6 * milliseconds(lambda: torch.cuda._sleep(SLEEP))[0]
    assert passed_ns == pytest.approx(plain_ns / 4, rel=0.1, abs=50_000)
    advancer.close()
