"""schemas/*.schema.json is what the models say, byte for byte."""

from __future__ import annotations

import pytest

import prismtrace as pt
from prismcalib.merging import merge
from prismtrace.column_docs import EXTRA_COLUMNS, FILLED_BY_MERGE, columns_page
from prismtrace.schema import MODELS, Node
from prismtrace.schema_files import schema_text

NAMES = sorted(MODELS)


@pytest.mark.parametrize("name", NAMES)
def test_schema_file_equals_the_model(name, repo, regenerate):
    path = repo / "schemas" / f"{name}.schema.json"
    text = schema_text(name)
    if regenerate:
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert path.read_bytes() == text.encode(), "run `make docs` and review the difference"


def test_every_column_is_described():
    assert [name for name, field in Node.model_fields.items() if not field.description] == []


def test_page_of_columns_is_current(repo, regenerate):
    path = repo / "docs/reference/columns.md"
    if regenerate:
        path.write_text(columns_page(), encoding="utf-8")
    assert path.read_text(encoding="utf-8") == columns_page(), "run `make docs`"


def test_what_merge_fills_in_and_what_else_commands_write(tmp_path, write_gloo_traces):
    write_gloo_traces(tmp_path)
    pt.convert(tmp_path / "rank*.json.gz", tmp_path / "run.parquet")
    trace = pt.open(tmp_path / "run.parquet")
    before, after = trace.collect(), merge(trace).nodes
    assert all(before[name].null_count() == before.height for name in FILLED_BY_MERGE)
    assert all(after[name].null_count() < after.height for name in FILLED_BY_MERGE)
    written = {name for name in after.columns if name.startswith("x_")}
    assert written <= set(EXTRA_COLUMNS)
    assert {"x_busy_ns", "x_kernels", "x_observed_start_ns"} <= written


def test_no_schema_file_without_a_model(repo):
    found = {path.name.removesuffix(".schema.json") for path in (repo / "schemas").iterdir()}
    assert found == set(NAMES)
