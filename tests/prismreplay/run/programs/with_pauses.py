"""A script with a pause at the end of every step: `with_pauses.py SCRIPT ARGUMENTS`.

The backend holds tensors of communications until a thread of it has looked (ten times a second), and so
peaks of memory are chance. After these pauses it has looked, in each run.
"""

from __future__ import annotations

import runpy
import sys
import time
from pathlib import Path

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

PAUSE_S = 0.25


def pause(*_: object) -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    time.sleep(PAUSE_S)


register_optimizer_step_post_hook(pause)
script = Path(sys.argv[1])
sys.argv = sys.argv[1:]
sys.path[0] = str(script.parent)
runpy.run_path(str(script), run_name="__main__")
