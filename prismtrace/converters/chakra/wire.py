"""Protobuf's wire format, read for many messages at a time.

The library makes a Python object of every message and every attribute, which takes 4 to 6 µs a
node. Here the k-th fields of all messages of a block are read together, as arrays. A test
compares what comes out with what the library reads.

The format is described in https://protobuf.dev/programming-guides/encoding.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["LENGTH_DELIMITED", "VARINT", "Block", "Fields", "Spans", "ints"]

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

VARINT, FIXED64, LENGTH_DELIMITED, FIXED32 = 0, 1, 2, 5
_VARINT_BYTES = 10  # the longest varint
_MOST_FIELDS = 1 << 16
"""Of one message. Lists are packed into one field; what has more only costs time."""
_FEW = 24
"""So few messages are quicker read one after the other."""


def ints(values: Ints | Bools) -> Ints:
    """Values, or the positions of true ones, as 64-bit integers."""
    if values.dtype == np.bool_:
        return np.flatnonzero(values).astype(np.int64)
    return values.astype(np.int64)


@dataclass(frozen=True)
class Spans:
    """Parts of a block, from `begin` until before `end`; arrays of one length."""

    begin: Ints
    end: Ints

    def __len__(self) -> int:
        return len(self.begin)

    def take(self, chosen: Ints | Bools) -> Spans:
        """Some of them."""
        return Spans(self.begin[chosen], self.end[chosen])


@dataclass(frozen=True)
class Fields:
    """Fields of many messages; within a message in the order of the file.

    `value` is the number of a varint (as 64 bits, signed) or the length of a string or message,
    whose bytes are at `begin`.
    """

    message: Ints
    number: Ints
    wire_type: Ints
    value: Ints
    begin: Ints

    def take(self, chosen: Ints | Bools) -> Fields:
        """Some of them."""
        return Fields(
            self.message[chosen],
            self.number[chosen],
            self.wire_type[chosen],
            self.value[chosen],
            self.begin[chosen],
        )

    def of(self, number: int, wire_type: int) -> Fields:
        """Those with a number, written in a way."""
        return self.take((self.number == number) & (self.wire_type == wire_type))

    @property
    def spans(self) -> Spans:
        """Where strings and messages lie."""
        return Spans(self.begin, self.begin + self.value)


class Block:
    """Some bytes of a file that hold whole messages."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        # Varints may be looked for some bytes beyond the end; what is read there is refused.
        self._bytes = np.zeros(len(data) + 2 * _VARINT_BYTES, dtype=np.uint8)
        self._bytes[: len(data)] = np.frombuffer(data, dtype=np.uint8)

    def fields(self, messages: Spans) -> tuple[Fields, Bools]:
        """All fields of the messages, and which messages are none.

        A message is none when a field ends outside of it or is written in no known way; of such
        a message some fields may be among the result.
        """
        found: list[Fields] = []
        bad = np.zeros(len(messages), dtype=np.bool_)
        live = ints(messages.begin < messages.end)
        at, end = messages.begin[live], messages.end[live]
        rounds = 0
        while len(live) > _FEW and rounds < _MOST_FIELDS:
            fields, after, wrong = self._next(live, at, end)
            found.append(fields)
            bad[live[wrong]] = True
            going = ~wrong & (after < end)
            live, at, end = live[going], after[going], end[going]
            rounds += 1
        for message, begin, stop in zip(live.tolist(), at.tolist(), end.tolist(), strict=True):
            fields, bad[message] = self._one(message, begin, stop)
            found.append(fields)
        return _joined(found), bad

    def _next(self, live: Ints, at: Ints, end: Ints) -> tuple[Fields, Ints, Bools]:
        """One field of each message, where they end, and which are none."""
        key, at, wrong = self._varints(at)
        wire_type = key & 7
        # Most fields are varints or start with one: their length.
        value, begin, unending = self._varints(np.minimum(at, end))
        fixed = np.where(wire_type == FIXED64, 8, 4)
        is_fixed = (wire_type == FIXED64) | (wire_type == FIXED32)
        delimited = wire_type == LENGTH_DELIMITED
        wrong |= unending & ~is_fixed
        wrong |= ~(is_fixed | delimited | (wire_type == VARINT))
        wrong |= (key >> 3 <= 0) | (delimited & (value < 0))
        # Compared before it is added: a length may be anything.
        wrong |= delimited & (value > end - begin)
        after = np.where(delimited, begin + np.where(wrong, 0, value), begin)
        after = np.where(is_fixed, at + fixed, after)
        wrong |= after > end
        return Fields(live, key >> 3, wire_type, value, begin), after, wrong

    def _one(self, message: int, at: int, end: int) -> tuple[Fields, bool]:
        """The fields of one message."""
        rows: list[tuple[int, int, int, int, int]] = []
        wrong = False
        data = self.data
        while at < end:
            key, at = _varint(data, at, end)
            value, after = _varint(data, at, end)
            number, wire_type, begin = key >> 3, key & 7, after
            if wire_type == LENGTH_DELIMITED:
                after += value
            elif wire_type in (FIXED64, FIXED32):
                value, after = 0, at + (8 if wire_type == FIXED64 else 4)
            elif wire_type != VARINT:
                number = 0
            if key < 0 or value < 0 or not 0 < number < 2**61 or after > end:
                wrong = True
                break
            value = value - 2**64 if value >= 2**63 else value
            rows.append((message, number, wire_type, value, begin))
            if len(rows) > _MOST_FIELDS:
                wrong = True
                break
            at = after
        columns = np.array(rows, dtype=np.int64).reshape(-1, 5).T
        return Fields(*columns), wrong

    def _varints(self, at: Ints) -> tuple[Ints, Ints, Bools]:
        """Numbers that begin at some places, where they end, and which are too long."""
        data = self._bytes
        first = data[at]
        value = (first & 0x7F).astype(np.int64)
        after = at + 1
        going = ints(first >= 0x80)
        shift = 0
        while len(going):
            shift += 7
            if shift >= 7 * _VARINT_BYTES:
                break
            byte = data[after[going]].astype(np.int64)
            value[going] |= (byte & 0x7F) << shift
            after[going] += 1
            going = going[byte >= 0x80]
        wrong = np.zeros(len(at), dtype=np.bool_)
        wrong[going] = True
        return value, after, wrong

    def packed(self, spans: Spans) -> tuple[Ints, Ints, Bools]:
        """Numbers of packed lists: the list each belongs to, its value, and which lists are none."""
        lengths = spans.end - spans.begin
        owner = np.repeat(np.arange(len(spans)), lengths)
        offset = np.arange(len(owner)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        data = self._bytes[np.repeat(spans.begin, lengths) + offset]
        last = data < 0x80
        bad = np.zeros(len(spans), dtype=np.bool_)
        filled = lengths > 0
        bad[filled] = self._bytes[spans.end[filled] - 1] >= 0x80
        bad_byte = bad[owner]
        data, last, owner = data[~bad_byte], last[~bad_byte], owner[~bad_byte]
        ends = np.flatnonzero(last)
        if not len(ends):
            return np.zeros(0, np.int64), np.zeros(0, np.int64), bad
        begins = np.concatenate([[0], ends[:-1] + 1])
        place = np.arange(len(data)) - np.repeat(begins, ends - begins + 1)
        shifted = (data & 0x7F).astype(np.int64) << np.minimum(7 * place, 63)
        values = np.bitwise_or.reduceat(shifted, begins)
        bad[owner[ends[ends - begins >= _VARINT_BYTES]]] = True
        return owner[ends].astype(np.int64), values, bad

    def equal(self, spans: Spans, text: bytes) -> Ints:
        """Positions of the spans whose bytes are `text`."""
        found = ints(spans.end - spans.begin == len(text))
        for place, byte in enumerate(text):
            found = found[self._bytes[spans.begin[found] + place] == byte]
        return found

    def texts(self, spans: Spans) -> list[bytes]:
        """The bytes of each span."""
        data = self.data
        ends = zip(spans.begin.tolist(), spans.end.tolist(), strict=True)
        return [data[begin:end] for begin, end in ends]


def _varint(data: bytes, at: int, end: int) -> tuple[int, int]:
    """A number and where it ends; −1 if it does not."""
    value = 0
    for shift in range(0, 7 * _VARINT_BYTES, 7):
        if at >= end:
            break
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & (2**64 - 1), at
    return -1, at


def _joined(found: list[Fields]) -> Fields:
    if not found:
        return Fields(*(np.zeros(0, np.int64) for _ in range(5)))
    return Fields(
        np.concatenate([fields.message for fields in found]),
        np.concatenate([fields.number for fields in found]),
        np.concatenate([fields.wire_type for fields in found]),
        np.concatenate([fields.value for fields in found]),
        np.concatenate([fields.begin for fields in found]),
    )
