"""Memory of links between processes that have a GPU each: torch's symmetric memory.

Every process of the group gets memory of one size, and the addresses at which it sees the
others'. On one host, that is peer memory over NVLink or PCIe.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prismreplay.errors import PluginError
from prismreplay.plugin.device import require_device
from prismreplay.plugin.moves import Role, Schedule
from prismreplay.plugin.tables import Layout

__all__ = ["peer_link_memory"]

Tensor = Any


def peer_link_memory(
    schedule: Schedule, layout: Layout, roles: Mapping[int, Role], group: Any
) -> dict[Role, Tensor | int]:
    """Every role's memory as this process sees it: its own as a tensor, others' as addresses.

    Args:
        schedule: of the communication.
        layout: of its links.
        roles: which rank of `group` performs which role, one each.
        group: a torch process group over the sandbox ranks and the assistant, each with a device
            of its own, which is the current one. All its ranks call this together.

    Raises:
        PluginError: roles are missing, or the devices do not see each other's memory.
    """
    import torch
    import torch.distributed as dist
    import torch.distributed._symmetric_memory as symmetric

    device = require_device()
    if sorted(map(str, roles.values())) != sorted(map(str, schedule.roles)):
        raise PluginError(
            f"roles {list(roles.values())} are not those of {schedule.name}",
            hint=f"give each of its roles once: {', '.join(map(str, schedule.roles))}",
        )
    size = max(layout.bytes_of(schedule, role) for role in schedule.roles)
    memory = symmetric.empty(size, dtype=torch.uint8, device=f"cuda:{device}")
    memory.zero_()
    torch.cuda.synchronize(device)
    try:
        handle = symmetric.rendezvous(memory, group)
    except RuntimeError as error:
        raise PluginError(
            f"the devices of the group do not see each other's memory: {error}",
            hint="the `reduced` transport needs no peer memory",
        ) from error
    # Nobody may write before all memory is zero.
    dist.barrier(group)
    mine = dist.get_rank(group)
    return {
        role: memory if rank == mine else int(handle.buffer_ptrs[rank])
        for rank, role in roles.items()
    }
