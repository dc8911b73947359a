"""How the end of a rank is told."""

from __future__ import annotations

import pytest

from prismreplay.runtime.exits import told_end


@pytest.mark.parametrize(
    ("code", "told"),
    [
        (0, "ended with exit code 0"),
        (3, "ended with exit code 3"),
        (-9, "was killed by SIGKILL"),
        (-35, "was killed by signal 35"),  # of real time, without a name
    ],
)
def test_ends(code: int, told: str) -> None:
    assert told_end(code) == told
