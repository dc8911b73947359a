"""Ends the process that plays virtual ranks, between two communications."""

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
value = torch.ones(4)
dist.all_reduce(value)
if "now" in sys.argv:
    parent = os.getppid()
    family = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    for process in family:
        if int(process) != os.getpid():
            os.kill(int(process), signal.SIGKILL)
dist.all_reduce(value)
print("sum", value.sum().item())
