"""Our group in the place of torch's own, where a role performs operations on the real backend.

A role that wants some groups only makes these itself (`group_of`). One that wants all of them has
torch make them: then torch has made its group by its own rules: backend per device, options,
timeouts, splitting, debug wrappers. What is left to do is to have every table of torch that names
that group name ours instead. Names and tables are those of torch 2.11 to 2.14.
"""

from __future__ import annotations

from typing import Any

from torch.distributed import distributed_c10d as c10d

from prismreplay.runtime.operations import Group
from prismreplay.runtime.roles import Role

__all__ = ["group_of", "take_place"]


def group_of(role: Role, group: Group, backends: dict[str, str]) -> Any:
    """The real group that the role has made for `group`, or None: it needs none.

    Args:
        role: with a method `make_real_group` if it chooses group by group.
        group: as this rank holds it.
        backends: that the program asked for, by device type.
    """
    make = getattr(role, "make_real_group", None)
    return None if make is None else make(group, backends)


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
