"""Our group in the place of torch's own, where a role performs operations on the real backend.

torch has made its group by its own rules: backend per device, options, timeouts, splitting,
debug wrappers. What is left to do is to have every table of torch that names that group name
ours instead. Names and tables are those of torch 2.11 to 2.14.
"""

from __future__ import annotations

from typing import Any

from torch.distributed import distributed_c10d as c10d

__all__ = ["take_place"]


def take_place(ours: Any, real: Any) -> None:
    """Replace `real` by `ours` everywhere in torch.

    Args:
        ours: the `PrismProcessGroup` that holds `real`.
        real: a group that torch has made and registered.
    """
    world = c10d._world  # noqa: SLF001
    for table in (
        world.pg_map,
        world.pg_names,
        world.pg_group_ranks,
        world.pg_backend_config,
        world.pg_to_tag,
    ):
        if real in table:
            table[ours] = table.pop(real)
    for groups in world.tags_to_pg.values():
        groups[:] = [ours if each is real else each for each in groups]
    # Functional collectives find groups by name, in C++.
    c10d._unregister_process_group(ours.group_name)  # noqa: SLF001
    c10d._register_process_group(ours.group_name, ours)  # noqa: SLF001
