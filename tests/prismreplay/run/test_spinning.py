"""Pieces of the program at another pace."""

from __future__ import annotations

import pytest

from prismreplay.errors import PlanError
from prismreplay.run.clock import RunClock
from prismreplay.run.spinning import Spinner, read_spin
from prismreplay.runtime.program_position import ProgramPosition


@pytest.mark.parametrize(
    ("where", "fits", "not_"),
    [
        ("name = attention", ["attention"], ["attention 2", "self-attention"]),
        ("name='mlp (1)'", ["mlp (1)"], ["mlp 1"]),
        ('name ~ "attn|mlp"', ["self-attn", "mlp 3"], ["loss"]),
    ],
)
def test_which_ranges_are_meant(where, fits, not_):
    position, clock = ProgramPosition(cut=lambda _: None), RunClock(lambda: 0)
    spinner = Spinner([read_spin(where, 0.5)], position, clock)
    for name in (*fits, *not_):
        position.begin_range(name)
        assert clock.pace == (0.5 if name in fits else 1.0)
        position.end_range(name)
        assert clock.pace == 1.0
    assert spinner.entered == len(fits)


def test_the_innermost_counts():
    position, clock = ProgramPosition(cut=lambda _: None), RunClock(lambda: 0)
    Spinner([read_spin("name=a", 0.5), read_spin("name=b", 2.0)], position, clock)
    paces = []
    for name in ("a", "c", "b"):
        position.begin_range(name)
        paces.append(clock.pace)
    for name in ("b", "c", "a"):
        position.end_range(name)
        paces.append(clock.pace)
    assert paces == [0.5, 0.5, 2.0, 0.5, 0.5, 1.0]


@pytest.mark.parametrize("where", ["attention", "kind = 'compute'", 'name ~ "("', "name ="])
def test_what_is_none(where):
    with pytest.raises(PlanError, match="--spin"):
        read_spin(where, 0.5)


def test_factors():
    with pytest.raises(PlanError, match="from 0 on"):
        read_spin("name = a", -1)
