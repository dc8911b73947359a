"""What a process holds of a group: its name and members, its backends, torch's own group if any.

The half of a process group that torch asks about; the other half communicates
(`prismreplay.runtime.process_group`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed import ProcessGroup

from prismreplay.runtime.operations import Group
from prismreplay.runtime.virtual_backend import VirtualBackend

__all__ = ["HeldGroup"]


class HeldGroup(ProcessGroup):  # type: ignore[misc]
    """A group of ranks, as one of them holds it.

    Args:
        group: its name and members, as this rank holds them.
        store: the group's key-value store.
        backends: backend asked for, by device type, such as ``{"cuda": "nccl"}``.
        real: torch's own group of the same ranks, when the role wants real groups.
        options: backend options that the program passed.
    """

    def __init__(
        self, group: Group, store: Any, backends: dict[str, str], real: Any, options: Any
    ) -> None:
        super().__init__(group.rank, group.size)
        self.group = group
        self.backends = backends
        self.real = real
        self._store = store
        self._options = options
        self._bound_device: Any = None

    # ---- identity -------------------------------------------------------------------------

    def rank(self) -> int:
        """This process's rank in the group."""
        return self.group.rank

    def size(self) -> int:
        """Number of members."""
        return self.group.size

    getRank, getSize = rank, size  # noqa: N815  C++ names

    def name(self) -> str:
        """The backend, as the program asked for it."""
        return self.group.backend

    _get_backend_name = name

    def getBackendName(self) -> str:  # noqa: N802
        """For C++ code, which would cast a backend called "gloo" to its own class."""
        return "prismreplay"

    @property
    def group_name(self) -> str:
        """What torch calls the group."""
        return self.group.name

    @property
    def group_desc(self) -> str:
        """What the group is for, as its maker put it."""
        return self.group.desc

    def getGroupName(self) -> str:  # noqa: N802
        """As `group_name`, for C++."""
        return self.group.name

    def getGroupDesc(self) -> str:  # noqa: N802
        """As `group_desc`, for C++."""
        return self.group.desc

    def _set_group_name(self, name: str) -> None:
        """Its name was given when it was made."""

    def _set_group_desc(self, desc: str) -> None:
        self.group.desc = desc

    setGroupName, setGroupDesc = _set_group_name, _set_group_desc  # noqa: N815

    def get_group_store(self) -> Any:
        """The group's key-value store."""
        return self._store

    @property
    def bound_device_id(self) -> Any:
        """The device that the program bound the group to, if it did."""
        return self._bound_device if self.real is None else self.real.bound_device_id

    @bound_device_id.setter
    def bound_device_id(self, device: Any) -> None:
        self._bound_device = device
        if self.real is not None:
            self.real.bound_device_id = device

    @property
    def _device_types(self) -> list[Any]:
        if self.real is not None:
            return list(self.real._device_types)  # noqa: SLF001
        return [torch.device(name) for name in self.backends]

    def backend_for(self, device_type: str) -> str:
        """The backend that serves tensors of a device type, as the program asked for it."""
        return self.backends.get(device_type) or next(iter(self.backends.values()))

    def _get_backend(self, device: Any) -> Any:
        if self.real is not None:
            return self.real._get_backend(torch.device(device))  # noqa: SLF001
        return VirtualBackend(self.backend_for(torch.device(device).type), self._options)

    # ---- administration -------------------------------------------------------------------

    def shutdown(self) -> None:
        """The group is not used any more."""
        if self.real is not None:
            self.real.shutdown()
            self.let_go()

    def let_go(self) -> None:
        """Give the real group up: its threads end, provided that all it was to do is done.

        Whoever holds this group, such as a `DistributedDataParallel`, held the real one until
        the interpreter ends. A thread of gloo that then drops its last operation wants the
        interpreter's lock, and the process aborts ("terminate called without an active exception").
        """
        self.real = None

    def abort(self) -> None:
        """As `shutdown`, without waiting for anything."""
        if self.real is not None:
            self.real.abort()

    def set_timeout(self, timeout: Any) -> None:
        """Time limits are the run's affair, except on a real backend."""
        if self.real is not None:
            self.real.set_timeout(timeout)

    def _set_sequence_number_for_group(self) -> None:
        """Numbers start at 0 on every member."""

    def _has_hooks(self) -> bool:
        return False

    def _wait_for_pending_works(self) -> None:
        """No hooks, hence nothing is pending."""

    def _enable_collectives_timing(self) -> None:
        """Timing is the observer's affair."""
