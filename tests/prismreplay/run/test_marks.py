"""What a sandbox rank tells of itself."""

from __future__ import annotations

import pytest

from prismreplay.run.marks import StepMark, core_times, core_wait


def mark(rank, step, on_core_ns, queued_ns):
    return StepMark(rank, step, 0, 0, 0, 0, 0, 0, 0, on_core_ns, queued_ns)


def test_how_long_ranks_waited_for_a_core():
    marks = [mark(0, 0, 500, 900), mark(1, 0, 0, 0), mark(0, 1, 530, 910), mark(1, 1, 30, 30)]
    assert core_wait(marks) == pytest.approx(40 / 100)


def test_the_first_step_counts_where_it_is_the_only_one():
    assert core_wait([mark(0, 0, 30, 10)]) == pytest.approx(0.25)


@pytest.mark.parametrize("marks", [[], [mark(0, 0, 0, 0), mark(0, 1, 0, 0)]])
def test_nothing_is_said_where_nothing_is_known(marks):
    assert core_wait(marks) == 0


def test_the_kernel_tells_how_long_this_process_computed():
    before = core_times()
    if before == (0, 0):
        pytest.skip("this kernel keeps no statistics of its scheduler")
    sum(range(2_000_000))
    after = core_times()
    assert after[0] > before[0]
    assert after[1] >= before[1]
