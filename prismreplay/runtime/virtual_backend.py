"""What torch asks a group's backend about, where no backend exists."""

from __future__ import annotations

from typing import Any

__all__ = ["VirtualBackend"]


class VirtualBackend:
    """Stands in for the backend of a virtual group.

    Args:
        name: as the program asked for it.
        options: that the program passed.
    """

    supports_splitting = True
    supports_coalescing = False
    supports_time_estimate = False
    supports_shrinking = False

    def __init__(self, name: str, options: Any = None) -> None:
        self._name = name
        self.options = options

    def name(self) -> str:
        """As the program asked for it."""
        return self._name

    def supports_tensor_alloc(self, device: Any) -> bool:  # noqa: ARG002
        """False: no memory of its own."""
        return False

    def perform_nocolor_split(self, device: Any) -> None:
        """A split that this rank takes no part in; nothing to do."""

    def eager_connect_single_device(self, device: Any = None) -> None:
        """Nothing to connect."""

    def _set_sequence_number_for_group(self) -> None:
        """Nothing to number."""

    def _set_default_timeout(self, timeout: Any) -> None:
        """Nothing waits."""
