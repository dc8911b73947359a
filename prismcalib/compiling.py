"""Compiling loops over arrays with numba: the options, the cache on disk, and prefetching.

Importing this module imports numba: about half a second.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numba
import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import cgutils, types
from numba.core.caching import FunctionCache
from numba.extending import intrinsic

__all__ = [
    "AHEAD",
    "NO_LAGS",
    "NO_ROWS",
    "NO_TIMES",
    "compiled",
    "read_only",
    "will_read",
    "will_write",
]

AHEAD = 16
"""How many rows ahead of their use memory is asked for."""

NO_TIMES = np.empty(0, np.int64)
NO_TIMES.flags.writeable = False
NO_LAGS = np.empty((0, 1), np.int64)
NO_LAGS.flags.writeable = False
NO_ROWS = np.empty(0, np.int32)
NO_ROWS.flags.writeable = False


def read_only(array: Any) -> Any:
    """A read-only view, since numba compiles anew for each mix of writable and read-only."""
    if array is None:
        return NO_TIMES
    view = array.view()
    view.flags.writeable = False
    return view


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function compiled at its first call, kept on disk where a folder can be written."""
    dispatcher = numba.njit(nogil=True, boundscheck=False)(function)
    # No writable folder: compile once per process instead.
    with suppress(RuntimeError, OSError):
        # What `cache=True` would set, but for the kind of cache.
        dispatcher._cache = _LenientCache(function)  # noqa: SLF001
    return dispatcher  # type: ignore[no-any-return]


class _LenientCache(FunctionCache):  # type: ignore[misc]
    """numba's cache on disk; one that is damaged, full or unwritable only costs time."""

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """The code compiled earlier, or None."""
        # Unpickling what was damaged raises anything.
        with suppress(Exception):
            return super().load_overload(sig, target_context)
        # Start anew, or it would be found damaged each time.
        with suppress(OSError):
            self.flush()
        return None

    def save_overload(self, sig: Any, data: Any) -> None:
        """Keep compiled code, if that can be done."""
        with suppress(Exception):
            super().save_overload(sig, data)


def _prefetch_intrinsic(write: int) -> Any:
    """`prefetch(array, index)`: ask for the cache line of an element, soon read or written."""

    def prefetch(_typing: Any, array: Any, _index: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            data = context.make_array(signature.args[0])(context, builder, args[0]).data
            pointer = builder.bitcast(builder.gep(data, [args[1]]), ir.IntType(8).as_pointer())
            flag = ir.IntType(32)
            function = cgutils.get_or_insert_function(
                builder.module,
                ir.FunctionType(ir.VoidType(), [pointer.type, flag, flag, flag]),
                "llvm.prefetch.p0",
            )
            # Keep in all cache levels (3); data, not instructions (1).
            builder.call(function, [pointer, flag(write), flag(3), flag(1)])
            return context.get_dummy_value()

        return types.void(array, types.intp), generate

    return intrinsic(prefetch)


will_read = _prefetch_intrinsic(0)
will_write = _prefetch_intrinsic(1)
