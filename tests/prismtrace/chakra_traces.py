"""Chakra traces and PyTorch execution traces as their tools would have written them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prismtrace.converters.chakra.messages import message_class

COMP, SEND, RECV, COLL = 4, 5, 6, 7
ALL_REDUCE, ALL_GATHER, BROADCAST = 0, 2, 5


def attribute(name: str, value: Any) -> Any:
    """An attribute; a pair says which field holds the value."""
    field = "int64_val"
    if isinstance(value, tuple):
        field, value = value
    elif isinstance(value, bool):
        field = "bool_val"
    elif isinstance(value, str):
        field = "string_val"
    message = message_class("AttributeProto")(name=name)
    if field == "bool_list":
        message.bool_list.values.extend(value)
        return message
    setattr(message, field, value)
    return message


def node(number: int, type_: int = COMP, title: str = "gemm", **more: Any) -> bytes:
    """One node: `data`, `ctrl` (lists), `start`, `dur`, `values`; all else are attributes."""
    message = message_class("Node")(
        id=number,
        name=title,
        type=type_,
        data_deps=more.pop("data", []),
        ctrl_deps=more.pop("ctrl", []),
        start_time_micros=more.pop("start", 0),
        duration_micros=more.pop("dur", 0),
    )
    if "values" in more:
        message.inputs.values = more.pop("values")
    message.attr.extend(attribute(*item) for item in more.items())
    return message.SerializeToString()


def metadata(**facts: Any) -> bytes:
    """The first message of a file."""
    message = message_class("GlobalMetadata")(version="0.0.4")
    message.attr.extend(attribute(*item) for item in facts.items())
    return message.SerializeToString()


def framed(*messages: bytes) -> bytes:
    """Messages, each after its length."""
    text = bytearray()
    for message in messages:
        length = len(message)
        while length > 0x7F:
            text.append(length & 0x7F | 0x80)
            length >>= 7
        text.append(length)
        text += message
    return bytes(text)


def write(path: Path, *messages: bytes) -> Path:
    """A file of frames."""
    path.write_bytes(framed(*messages))
    return path
