"""Chakra's messages, as classes of the protobuf library.

The schema is written down here as a table of fields, and the library makes the classes of it
when they are first asked for: no generated module, and no compiler to call. To follow a change
of the schema, change the table.
"""

from __future__ import annotations

from functools import cache
from typing import Any

__all__ = ["message_class"]

_PACKAGE = "ChakraProtoMsg"

# Message -> (field, number, type, repeated). Names in capitals are those of protobuf's types.
_MESSAGES: dict[str, tuple[tuple[str, int, str, bool], ...]] = {
    "GlobalMetadata": (
        ("version", 1, "STRING", False),
        ("attr", 2, "AttributeProto", True),
    ),
    "Node": (
        ("id", 1, "UINT64", False),
        ("name", 2, "STRING", False),
        ("type", 3, "INT32", False),  # an enumeration, which is written in the same way
        ("ctrl_deps", 4, "UINT64", True),
        ("data_deps", 5, "UINT64", True),
        ("start_time_micros", 6, "UINT64", False),
        ("duration_micros", 7, "UINT64", False),
        ("inputs", 8, "IOInfo", False),
        ("outputs", 9, "IOInfo", False),
        ("attr", 10, "AttributeProto", True),
    ),
    "IOInfo": (
        ("values", 1, "STRING", False),
        ("shapes", 2, "STRING", False),
        ("types", 3, "STRING", False),
    ),
    "BoolList": (("values", 1, "BOOL", True),),
    "AttributeProto": (
        ("name", 1, "STRING", False),
        ("doc_string", 2, "STRING", False),
        ("int32_val", 7, "INT32", False),
        ("int64_val", 9, "INT64", False),
        ("uint32_val", 11, "UINT32", False),
        ("uint64_val", 13, "UINT64", False),
        ("sint32_val", 15, "SINT32", False),
        ("sint64_val", 17, "SINT64", False),
        ("bool_val", 27, "BOOL", False),
        ("bool_list", 28, "BoolList", False),
        ("string_val", 29, "STRING", False),
    ),
}
_FIRST_VALUE = 3
"""Fields of an attribute from this number on are its value: at most one of them is there."""


@cache
def message_class(name: str) -> Any:
    """The class of a message, such as ``Node``."""
    from google.protobuf import message_factory

    return message_factory.GetMessageClass(_pool().FindMessageTypeByName(f"{_PACKAGE}.{name}"))


@cache
def _pool() -> Any:
    from google.protobuf import descriptor_pb2, descriptor_pool

    file = descriptor_pb2.FileDescriptorProto(
        name="prismtrace/chakra.proto", package=_PACKAGE, syntax="proto3"
    )
    field_type = descriptor_pb2.FieldDescriptorProto
    for message_name, fields in _MESSAGES.items():
        message = file.message_type.add(name=message_name)
        if message_name == "AttributeProto":
            message.oneof_decl.add(name="value")
        for field_name, number, kind, repeated in fields:
            field = message.field.add(name=field_name, number=number)
            field.label = field_type.LABEL_REPEATED if repeated else field_type.LABEL_OPTIONAL
            if kind in _MESSAGES:
                field.type, field.type_name = field_type.TYPE_MESSAGE, f".{_PACKAGE}.{kind}"
            else:
                field.type = getattr(field_type, f"TYPE_{kind}")
            if message_name == "AttributeProto" and number >= _FIRST_VALUE:
                field.oneof_index = 0
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return pool
