"""A device for `Advancer` that is no device: streams are threads, kernels the host's."""

from __future__ import annotations

import ctypes
import queue
import threading
import time
from types import SimpleNamespace

import numpy as np

_CALL_WORDS = 20
_ENTRIES = {
    name: number
    for number, name in enumerate(
        [
            *(f"{kind}_{size}" for kind in ("advance", "arrive") for size in ("96", "448", "far")),
            "owe",
            "answer",
        ],
        start=1,
    )
}


class HostMemory:
    """In place of `DriverMemory`."""

    stream = 1

    def __init__(self, library):
        self._library = library
        self._kept = []
        self._streams = {}
        self._launched = threading.Lock()

    def on_device(self, size_bytes):
        self._kept.append(np.zeros(-(-size_bytes // 8), np.int64))
        return self._kept[-1].ctypes.data

    def pinned(self, words):
        at = self.on_device(8 * words)
        return at, self._kept[-1]

    def register(self, address, _size_bytes):
        return address

    def clear(self, address, size_bytes):
        ctypes.memset(address, 0, size_bytes)

    def fetch(self, address, there):
        ctypes.memmove(there.ctypes.data, address, there.nbytes)

    def synchronize(self, stream=None):
        streams = [stream] if stream is not None else list(self._streams)
        for one in streams:
            if one in self._streams:
                self._streams[one].join()

    def launcher(self):
        return self._launch

    def close(self):
        self.synchronize()

    def busy(self, stream, seconds):
        """Keep a stream busy for so long."""
        self._put(stream, lambda: time.sleep(seconds))

    def _launch(self, handle, *rest):
        stream, arguments = rest[-3], rest[-2]
        name = next(name for name, number in _ENTRIES.items() if number == handle)
        if name in ("owe", "answer"):
            values = [
                ctypes.cast(arguments[number], ctypes.POINTER(ctypes.c_uint64))[0]
                for number in range(len(arguments))
            ]
            if name == "owe":
                at = ctypes.cast(arguments[3], ctypes.POINTER(ctypes.c_double))
                values[3] = ctypes.c_double(at[0])
            values = [
                one if isinstance(one, ctypes.c_double) else ctypes.c_uint64(one) for one in values
            ]
            self._put(stream, lambda: getattr(self._library, f"{name}_once")(*values))
            return 0
        call = np.ctypeslib.as_array(
            ctypes.cast(arguments[0], ctypes.POINTER(ctypes.c_int64)), (_CALL_WORDS,)
        ).copy()
        kind, size = name.split("_")
        there = ctypes.cast(arguments[1], ctypes.POINTER(ctypes.c_int64))
        if size == "far":
            code = ctypes.c_void_p(there[0])
            words = None
        else:
            words = np.ctypeslib.as_array(there, (int(size),)).copy()
            code = ctypes.c_void_p(words.ctypes.data)

        def run():
            pointer = ctypes.c_void_p(call.ctypes.data)
            if kind == "arrive":
                self._library.arrive(pointer, code)
            else:
                self._library.run(1, pointer, (ctypes.c_void_p * 1)(code))
            del_later.append(words)

        del_later = [words]
        self._put(stream, run)
        return 0

    def _put(self, stream, work):
        with self._launched:
            if stream not in self._streams:
                self._streams[stream] = queue.Queue()
                threading.Thread(
                    target=_perform, args=(self._streams[stream],), daemon=True
                ).start()
        self._streams[stream].put(work)


def _perform(works):
    while True:
        works.get()()
        works.task_done()


def kernel(_name, entry, _device):
    """In place of `prismreplay.plugin.device.kernel`."""
    return SimpleNamespace(address=_ENTRIES[entry])
