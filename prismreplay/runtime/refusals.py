"""Methods of torch's process group that mean nothing here: they raise an error that names them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch.distributed import ProcessGroup

from prismreplay.errors import UnsupportedOperationError

__all__ = ["refuse_all_others"]

# What may stay as torch has it: it works without a backend.
_INHERITED = frozenset({"boxed", "unbox", "use_pg_for_symm_mem_rendezvous"})

_Class = TypeVar("_Class", bound=type[Any])


def refuse_all_others(group: _Class) -> _Class:
    """Have a class of groups refuse each method of torch's that it and its bases do not define.

    Nothing falls through to the C++ base class, which has no backend and may crash.
    """
    ours = group.__mro__[: group.__mro__.index(ProcessGroup)]
    defined = {name for each in ours for name in vars(each)}
    for method in dir(ProcessGroup):
        if (
            not method.startswith("__")
            and method not in _INHERITED
            and method != "_pybind11_conduit_v1_"
            and method not in defined
            and callable(getattr(ProcessGroup, method))
            and not isinstance(getattr(ProcessGroup, method), type)
        ):
            setattr(group, method, _refusal(method))
    return group


def _refusal(method: str) -> Callable[..., Any]:
    def refuse(self: Any, *_arguments: Any, **_keywords: Any) -> Any:
        raise UnsupportedOperationError(
            f"ProcessGroup.{method}",
            where=f"group={self.group.called}",
            hint="docs/reference/communication.md lists what is covered",
        )

    refuse.__name__ = method
    return refuse
