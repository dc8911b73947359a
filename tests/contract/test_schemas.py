"""schemas/*.schema.json is what the models say, byte for byte."""

from __future__ import annotations

import pytest

from prismtrace.schema import MODELS
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


def test_no_schema_file_without_a_model(repo):
    found = {path.name.removesuffix(".schema.json") for path in (repo / "schemas").iterdir()}
    assert found == set(NAMES)
