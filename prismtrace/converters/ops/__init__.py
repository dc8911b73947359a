"""Converter for operation-level logs: one row per forward, backward, send, recv, collective."""

from prismtrace.converters.ops.convert import convert_operations
from prismtrace.converters.ops.mapping import ColumnMapping, load_mapping

__all__ = ["ColumnMapping", "convert_operations", "load_mapping"]
