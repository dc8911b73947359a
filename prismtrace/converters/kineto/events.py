"""One profiler event, as far as conversion needs it, and how to decode many of them.

Everything not named here is skipped by the decoder without ever becoming a Python object.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from decimal import Decimal, InvalidOperation
from typing import Any

import msgspec

from prismtrace.converters.kineto.values import int64
from prismtrace.errors import SourceFormatError

__all__ = [
    "EXACT_FLOAT_LIMIT_US",
    "Event",
    "EventArgs",
    "EventDecoder",
    "check_keep_args",
    "kept_field",
]

# Below 2**43 microseconds a float64 still tells nanoseconds apart. Timestamps relative to the
# file's base stay below it (the base moves every three months = 7.9e12 us); absolute ones with
# a fraction do not, and are decoded as decimals.
EXACT_FLOAT_LIMIT_US = 2.0**43

_NO_JSON = msgspec.Raw(b"")
_Int = int | str | None


def _arg(name: str) -> Any:
    return msgspec.field(default=None, name=name)


class EventArgs(msgspec.Struct, gc=False):
    """The `args` of one event; integers may have been written as strings."""

    correlation: _Int = None
    stream: _Int = None
    device: _Int = None
    bytes: _Int = None
    external_id: _Int = _arg("External id")
    external_id_2021: _Int = _arg("external id")
    rf_id: _Int = _arg("Record function id")
    # Communication
    collective: str | None = _arg("Collective name")
    dtype: str | None = None
    in_nelems: _Int = _arg("In msg nelems")
    out_nelems: _Int = _arg("Out msg nelems")
    in_size: _Int = _arg("In msg size")  # what torch 2.2 called In msg nelems
    out_size: _Int = _arg("Out msg size")
    group_size: _Int = _arg("Group size")
    pg_name: _Int = _arg("Process Group Name")
    pg_desc: str | None = _arg("Process Group Description")
    pg_ranks: str | None = _arg("Process Group Ranks")
    in_split: str | None = _arg("In split size")
    out_split: str | None = _arg("Out split size")
    seq: _Int = _arg("Seq")
    comms_id: _Int = _arg("Comms Id")
    src_rank: _Int = _arg("Src Rank")
    dst_rank: _Int = _arg("Dst Rank")
    peer: _Int = _arg("Rank")
    is_async: bool | int | str | None = _arg("Is asynchronized op")
    concrete_inputs: msgspec.Raw = msgspec.field(default=_NO_JSON, name="Concrete Inputs")
    input_dims: msgspec.Raw = msgspec.field(default=_NO_JSON, name="Input Dims")
    input_type: msgspec.Raw = msgspec.field(default=_NO_JSON, name="Input type")
    # Synchronization
    sync_kind: str | None = _arg("cuda_sync_kind")
    wait_on_stream: _Int = None
    wait_on_record: _Int = _arg("wait_on_cuda_event_record_corr_id")


class Event(msgspec.Struct, gc=False):
    """One element of `traceEvents`; `ts` and `dur` in microseconds."""

    ph: str | None = None
    cat: str | None = None
    name: str | None = None
    pid: _Int = None
    tid: _Int = None
    ts: int | float | Decimal | None = None
    dur: int | float | Decimal | None = None
    args: EventArgs | None = None


class EventDecoder:
    """Decodes JSON text of event lists; turns to exact decimals for good when a file needs it.

    `keep_args` names further args; event.args then carries them as `kept_0`, `kept_1`, …
    """

    def __init__(self, keep_args: Sequence[str] = ()) -> None:
        self._args_type = _args_type(keep_args)
        self._fast = msgspec.json.Decoder(list[self._event_type(int | float | None)])  # type: ignore[misc]
        self._exact_type = self._event_type(Decimal | None)
        self._exact = msgspec.json.Decoder(list[self._exact_type])  # type: ignore[name-defined]
        self._needs_decimals = False

    def _event_type(self, number: Any) -> type[Event]:
        fields = [
            ("ts", number, None),
            ("dur", number, None),
            ("args", self._args_type | None, None),
        ]
        return msgspec.defstruct("DecodedEvent", fields, bases=(Event,), gc=False)  # type: ignore[return-value]

    def decode(self, text: bytes) -> list[Event]:
        """`text` is a JSON array of events. Raises msgspec.MsgspecError when it is not."""
        if not self._needs_decimals:
            events: list[Event] = self._fast.decode(text)
            if not _has_long_decimals(events):
                return events
            self._needs_decimals = True
        return self._exact.decode(text)

    def decode_loosely(self, text: bytes, counts: Counter[str]) -> Event:
        """Decode one event, dropping (and counting) fields of unexpected types.

        Raises msgspec.MsgspecError when `text` is not one JSON object.
        """
        value = msgspec.json.Decoder(dict[str, Any], float_hook=Decimal).decode(text)
        event = self._exact_type()
        for field in ("ph", "cat", "name"):
            setattr(event, field, _text_or_none(value.get(field), counts))
        for field in ("pid", "tid"):
            raw = value.get(field)
            setattr(event, field, raw if isinstance(raw, str) else int64(raw, counts))
        event.ts = _decimal_or_none(value.get("ts"), counts)
        event.dur = _decimal_or_none(value.get("dur"), counts)
        args = value.get("args")
        if isinstance(args, dict):
            event.args = self._loose_args(args, counts)
        return event

    def _loose_args(self, raw: Mapping[str, Any], counts: Counter[str]) -> EventArgs:
        args = self._args_type()
        info = zip(args.__struct_fields__, args.__struct_encode_fields__, strict=True)
        for field, key in info:
            if key not in raw:
                continue
            value = raw[key]
            if isinstance(getattr(args, field), msgspec.Raw):
                value = msgspec.Raw(msgspec.json.encode(value))
            elif field in _TEXT_ARGS:
                value = _text_or_none(value, counts)
            elif not (
                field.startswith("kept_")
                or isinstance(value, str)
                or (field, type(value)) in _KEPT_AS_IS
            ):
                value = int64(value, counts)
            setattr(args, field, value)
        return args


# Values that int64 conversion would lose.
_KEPT_AS_IS = frozenset({("is_async", bool), ("comms_id", int)})
_TEXT_ARGS = frozenset(
    ("collective", "dtype", "pg_desc", "pg_ranks", "in_split", "out_split", "sync_kind")
)


def _args_type(keep_args: Sequence[str]) -> type[EventArgs]:
    if not keep_args:
        return EventArgs
    # An argument that has a field already is read from that field: a name decodes only once.
    fields = [
        (f"kept_{i}", Any, msgspec.field(default=None, name=name))
        for i, name in enumerate(keep_args)
        if kept_field(i, name) == f"kept_{i}"
    ]
    return msgspec.defstruct("KeptArgs", fields, bases=(EventArgs,), gc=False)  # type: ignore[return-value]


def check_keep_args(names: Sequence[str]) -> None:
    """Refuse names that no argument of an event has.

    Raises:
        SourceFormatError: a name is empty or has characters that JSON writes as escapes.
    """
    for name in names:
        if not name or not name.isprintable() or '"' in name or "\\" in name:
            raise SourceFormatError(
                f"{name!r} is no name of an argument",
                where="--keep-arg",
                hint="write it as a viewer shows it, e.g. 'registers per thread'",
            )


def kept_field(index: int, name: str) -> str:
    """The attribute of EventArgs that holds the `index`-th of keep_args, called `name`."""
    own = dict(zip(EventArgs.__struct_encode_fields__, EventArgs.__struct_fields__, strict=True))
    return own.get(name, f"kept_{index}")


def _has_long_decimals(events: list[Event]) -> bool:
    times = [e.ts for e in events if type(e.ts) is float]
    return bool(times) and (
        max(times) >= EXACT_FLOAT_LIMIT_US or min(times) <= -EXACT_FLOAT_LIMIT_US
    )


def _text_or_none(value: Any, counts: Counter[str]) -> str | None:
    if value is None or isinstance(value, str):
        return value
    counts["dropped-field"] += 1
    return None


def _decimal_or_none(value: Any, counts: Counter[str]) -> Decimal | None:
    if value is None:
        return None
    try:
        number = Decimal(value)
        if number.is_finite():
            return number
    except (TypeError, ValueError, InvalidOperation):
        pass
    counts["dropped-field"] += 1
    return None
