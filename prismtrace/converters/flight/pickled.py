"""Plain values out of a pickle, without ever running code.

A pickle is a program for a small stack machine. This machine knows only the instructions that
build numbers, texts, lists, tuples and dicts; one that would look up or call something is an
error. Nothing is taken from the file on trust: whatever is built needs bytes of the file, so
memory stays proportional to its size, and keys of dicts are numbers or texts, so that hashing
cannot be made to take long.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

__all__ = ["PlainPickleError", "load_plain"]


class PlainPickleError(ValueError):
    """The data is no pickle of plain values; the text says why."""


_CODE = {
    0x63: "GLOBAL",
    0x93: "STACK_GLOBAL",
    0x52: "REDUCE",
    0x62: "BUILD",
    0x69: "INST",
    0x6F: "OBJ",
    0x81: "NEWOBJ",
    0x92: "NEWOBJ_EX",
    0x50: "PERSID",
    0x51: "BINPERSID",
    0x82: "EXT1",
    0x83: "EXT2",
    0x84: "EXT4",
}
"""Instructions that look something up or call it."""


def load_plain(data: bytes) -> Any:
    """The value that a pickle (protocol 2 or later) describes.

    Raises:
        PlainPickleError: it would run code, breaks off, or is no such pickle.
    """
    return _Machine(data).run()


class _Machine:
    """Runs the instructions; `at` is the next byte, `marks` are heights of the stack."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}

    def run(self) -> Any:
        try:
            self._run()
            (value,) = self.stack
        except PlainPickleError:
            raise
        except (IndexError, KeyError, ValueError, TypeError, struct.error) as error:
            raise PlainPickleError(f"it is damaged or breaks off near byte {self.at}") from error
        return value

    def _run(self) -> None:
        """All instructions; the most frequent ones in line, which takes a third of the time."""
        data, handlers, memo = self.data, _HANDLERS, self.memo
        push = self.stack.append
        at = 0
        while (code := data[at]) != _STOP:
            at += 1
            if code == _LONG_BINGET:
                push(memo[_UINT32(data, at)[0]])
                at += 4
            elif code == _BINGET:
                push(memo[data[at]])
                at += 1
            elif code == _LONG_BINPUT:
                memo[_UINT32(data, at)[0]] = self.stack[-1]
                at += 4
            elif code == _BININT1:
                push(data[at])
                at += 1
            elif code == _BININT2:
                push(data[at] | data[at + 1] << 8)
                at += 2
            elif code == _NONE:
                push(None)
            elif code == _MARK:
                self.marks.append(len(self.stack))
            elif code == _EMPTY_LIST:
                push([])
            else:
                self.at = at
                handler = handlers[code]
                if handler is None:
                    raise self._refusal(code)
                handler(self)
                at = self.at

    def _refusal(self, code: int) -> PlainPickleError:
        if code in _CODE:
            return PlainPickleError(
                f"it asks to run code ({_CODE[code]} at byte {self.at - 1}), which is never done"
            )
        return PlainPickleError(f"byte {self.at - 1} is no instruction for plain values")

    def take(self, size: int) -> bytes:
        end = self.at + size
        if end > len(self.data):
            raise IndexError
        found = self.data[self.at : end]
        self.at = end
        return found

    def number(self, size: int) -> int:
        return int.from_bytes(self.take(size), "little")

    def since_mark(self) -> list[Any]:
        mark = self.marks.pop()
        items = self.stack[mark:]
        del self.stack[mark:]
        return items

    def below_mark(self, kind: type) -> Any:
        """The container that the items since the mark go into: below them, of that kind."""
        container = self.stack[self.marks[-1] - 1 if self.marks[-1] else len(self.stack)]
        if type(container) is not kind:
            raise TypeError
        return container

    # --- what the instructions do -----------------------------------------------------

    def memoize(self, key: int) -> None:
        self.memo[key] = self.stack[-1]

    def append(self) -> None:
        item = self.stack.pop()
        container = self.stack[-1]
        if type(container) is not list:
            raise TypeError
        container.append(item)

    def extend(self) -> None:
        container = self.below_mark(list)
        container.extend(self.since_mark())

    def set_item(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._fill(self.stack[-1], [key, value])

    def set_items(self) -> None:
        container = self.below_mark(dict)
        self._fill(container, self.since_mark())

    def _fill(self, container: Any, items: list[Any]) -> None:
        if type(container) is not dict or len(items) % 2:
            raise TypeError
        for key, value in zip(items[::2], items[1::2], strict=True):
            if type(key) is not str and type(key) is not int:
                raise PlainPickleError("a key is neither a text nor a number")
            container[key] = value

    def make_tuple(self, size: int) -> None:
        if len(self.stack) < size:
            raise IndexError
        items = tuple(self.stack[-size:])
        del self.stack[-size:]
        self.stack.append(items)

    def text(self, size: int) -> None:
        # Names of files may hold any bytes.
        self.stack.append(self.take(size).decode("utf-8", "replace"))

    def octets(self, size: int) -> None:
        self.stack.append(self.take(size))

    def integer(self, size: int, *, signed: bool) -> None:
        self.stack.append(int.from_bytes(self.take(size), "little", signed=signed))


_STOP, _MARK, _NONE, _EMPTY_LIST = b".(N]"
_LONG_BINGET, _BINGET, _LONG_BINPUT, _BININT1, _BININT2 = b"jhrKM"
_UINT32 = struct.Struct("<I").unpack_from
_Handler = Callable[[_Machine], object]
_HANDLERS: list[_Handler | None] = [None] * 256
for _code, _handler in {
    0x80: lambda m: m.take(1),  # PROTO
    0x95: lambda m: m.take(8),  # FRAME
    ord("}"): lambda m: m.stack.append({}),
    ord(")"): lambda m: m.stack.append(()),
    0x88: lambda m: m.stack.append(True),
    0x89: lambda m: m.stack.append(False),
    ord("J"): lambda m: m.integer(4, signed=True),
    0x8A: lambda m: m.integer(m.number(1), signed=True),
    0x8B: lambda m: m.integer(m.number(4), signed=True),
    ord("G"): lambda m: m.stack.append(struct.unpack(">d", m.take(8))[0]),
    0x8C: lambda m: m.text(m.number(1)),
    ord("X"): lambda m: m.text(m.number(4)),
    0x8D: lambda m: m.text(m.number(8)),
    ord("C"): lambda m: m.octets(m.number(1)),
    ord("B"): lambda m: m.octets(m.number(4)),
    ord("q"): lambda m: m.memoize(m.number(1)),
    0x94: lambda m: m.memoize(len(m.memo)),
    ord("a"): _Machine.append,
    ord("e"): _Machine.extend,
    ord("s"): _Machine.set_item,
    ord("u"): _Machine.set_items,
    ord("t"): lambda m: m.stack.append(tuple(m.since_mark())),
    0x85: lambda m: m.make_tuple(1),
    0x86: lambda m: m.make_tuple(2),
    0x87: lambda m: m.make_tuple(3),
}.items():
    _HANDLERS[_code] = _handler
