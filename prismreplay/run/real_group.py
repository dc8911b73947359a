"""Real groups of torch's own backend, made without torch's tables knowing of them."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
from torch._C import _distributed_c10d as native
from torch.distributed import ProcessGroup, ProcessGroupGloo

__all__ = ["gloo_group", "real_group"]

_GIVE_UP = timedelta(minutes=30)


def gloo_group(name: str, place: int, size: int, port: int) -> Any:
    """A group over gloo, as `torch.distributed.new_group` makes it.

    Args:
        name: the same on all members, and of no other group; they meet under it.
        place: of this member.
        size: members.
        port: of the store that they meet in, on this host.
    """
    return real_group(name, place, size, port, {"cpu": "gloo"})


def real_group(name: str, place: int, size: int, port: int, backends: dict[str, str]) -> Any:
    """As `gloo_group`, with a backend, gloo or nccl, for each type of device.

    NCCL makes its communicator at the group's first operation.
    """
    store: Any = native.HashStore()
    if size > 1:
        # torch's own: the names in torch.distributed are ours by now.
        store = native.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    store = native.PrefixStore(name, store)
    made = ProcessGroup(store, place, size)
    kinds = ProcessGroup.BackendType
    made._set_default_backend(kinds.NCCL if "nccl" in backends.values() else kinds.GLOO)  # noqa: SLF001
    for device, asked in backends.items():
        if asked == "nccl":
            kind, backend = kinds.NCCL, _nccl(store, place, size)
        else:
            kind, backend = kinds.GLOO, ProcessGroupGloo(store, place, size, _GIVE_UP)
        backend._set_sequence_number_for_group()  # noqa: SLF001
        made._register_backend(torch.device(device), kind, backend)  # noqa: SLF001
    made._set_group_name(name)  # noqa: SLF001
    return made


def _nccl(store: Any, place: int, size: int) -> Any:
    backend = torch.distributed.ProcessGroupNCCL
    options = backend.Options()
    options._timeout = _GIVE_UP  # noqa: SLF001
    return backend(native.PrefixStore("nccl", store), place, size, options)
