"""The pictures of docs/concepts.md are what the code draws; `--regenerate` writes them."""

from __future__ import annotations

import importlib.util

import pytest

NAMES = ("layers.svg", "wait-and-transfer.svg", "pipeline.svg", "slices.svg")


@pytest.fixture(scope="module")
def drawn(repo):
    spec = importlib.util.spec_from_file_location("diagrams", repo / "docs/site/diagrams.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.diagrams()


@pytest.mark.parametrize("name", NAMES)
def test_picture_is_current(name, drawn, repo, regenerate):
    path = repo / "docs/images" / name
    if regenerate:
        path.write_text(drawn[name], encoding="utf-8")
    assert path.read_text(encoding="utf-8") == drawn[name], "run `make docs`"
    assert "<title>" in drawn[name]


def test_no_picture_is_missing(drawn):
    assert set(drawn) == set(NAMES)
