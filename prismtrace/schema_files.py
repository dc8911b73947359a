"""JSON Schema files of the format, for readers in other languages."""

from __future__ import annotations

import json
from pathlib import Path

from prismtrace.output import atomic_output
from prismtrace.schema import MODELS, Schema, json_schema
from prismtrace.trace import PathLike

__all__ = ["schema_text", "write_schemas"]


def schema_text(name: Schema) -> str:
    """Content of ``schemas/<name>.schema.json``."""
    return json.dumps(json_schema(name), indent=2, ensure_ascii=False) + "\n"


def write_schemas(folder: PathLike, names: tuple[Schema, ...] = tuple(MODELS)) -> list[Path]:
    """Write one file per model into an existing folder; returns their paths.

    Raises:
        OutputError: the folder is missing or read-only, the disk is full.
    """
    paths = []
    for name in names:
        path = Path(folder) / f"{name}.schema.json"
        with atomic_output(path) as temporary:
            temporary.write_text(schema_text(name), encoding="utf-8")
        paths.append(path)
    return paths
