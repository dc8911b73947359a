"""Converters from foreign trace formats."""

from prismtrace.converters.pipeline import ConvertReport, convert

__all__ = ["ConvertReport", "convert"]
