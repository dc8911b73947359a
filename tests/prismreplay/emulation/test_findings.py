"""What an emulation says at its end."""

from __future__ import annotations

import math

import pytest

from prismreplay.emulation.findings import losses_in


@pytest.mark.parametrize(
    ("text", "losses"),
    [
        ("step 0  loss 5.6102\nstep 1  loss 4.25\n", (5.6102, 4.25)),
        ("{'train_loss': 2.5, 'lr': 0.1}", (2.5,)),
        ("iter 3 | lm loss: 1.096E+01 | loss scale: 1.0", (10.96,)),
        ("Loss=-0.5", (-0.5,)),
        ("a lossless step took 3 s", ()),
        ("the loss is printed elsewhere", ()),
        ("", ()),
    ],
)
def test_losses_are_found_in_what_a_program_prints(text, losses):
    assert losses_in(text) == losses


def test_a_loss_that_is_no_number_is_found():
    assert math.isnan(*losses_in("step 7 loss nan"))
