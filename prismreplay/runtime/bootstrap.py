"""Entry point ``torch.backends``: torch calls `autoload` at the end of ``import torch``.

Every process that imports torch anywhere comes through here, so without our environment variable
this does next to nothing, and it never fails: with it, the role is built when the process makes
its first process group. Launchers, data-loader workers and compiler workers never do.
"""

from __future__ import annotations

import os

__all__ = ["ROLE_VARIABLE", "autoload"]

ROLE_VARIABLE = "PRISMREPLAY_ROLE"
"""Names what a rank's process does: ``package.module:function``.

The function is called once, with ``rank`` and ``world_size``, and returns the `Role` and the
`GraphObserver` of this process.
"""


def autoload() -> None:
    """Have the first process group made by the role that the environment names, if any."""
    factory = os.environ.get(ROLE_VARIABLE)
    if factory:
        _wait_for_first_group(factory)


def _wait_for_first_group(factory: str) -> None:
    from torch.distributed import distributed_c10d as c10d

    make_group = c10d._new_process_group_helper  # noqa: SLF001
    if make_group.__module__ == __name__:
        return  # torch's entry point was here already

    def first_group(group_size: int, group_rank: int, *arguments: object, **more: object) -> object:
        import importlib

        from prismreplay.runtime.installing import install

        c10d._new_process_group_helper = make_group  # noqa: SLF001
        module, _, function = factory.partition(":")
        start = getattr(importlib.import_module(module), function)
        install(*start(rank=group_rank, world_size=group_size))
        return c10d._new_process_group_helper(group_size, group_rank, *arguments, **more)  # noqa: SLF001

    c10d._new_process_group_helper = first_group  # noqa: SLF001
