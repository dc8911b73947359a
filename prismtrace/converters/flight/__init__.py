"""PyTorch's flight recorder: what each rank had enqueued when its buffer was dumped."""

from __future__ import annotations
