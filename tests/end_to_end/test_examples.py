"""Every example runs and prints exactly what the `.out` file beside it holds.

`pytest tests/end_to_end/test_examples.py --regenerate` writes these files anew.
"""

from __future__ import annotations

import ast
from importlib import import_module
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "examples"
# They train for real, so nothing they print is exact.
WITHOUT_OUTPUT = {"train_ddp", "train_gpt", "train_moe", "compare_with_truth"}
EXAMPLES = sorted(path for path in FOLDER.glob("*.py") if path.stem not in WITHOUT_OUTPUT)
MOST_LINES = 60


def _stem(path: Path) -> str:
    return path.stem


def test_every_expected_output_has_its_example():
    assert {path.stem for path in FOLDER.glob("*.out")} == set(map(_stem, EXAMPLES))


@pytest.mark.parametrize("example", EXAMPLES, ids=_stem)
def test_example_prints_what_is_expected(example, tmp_path, run_command, regenerate):
    done = run_command("python", "-W", "error", example)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert list(tmp_path.iterdir()) == [], "examples leave nothing behind"
    expected = example.with_suffix(".out")
    if regenerate:
        expected.write_text(done.stdout, encoding="utf-8")
    assert done.stdout == expected.read_text(encoding="utf-8")


@pytest.mark.parametrize("example", EXAMPLES, ids=_stem)
def test_example_is_short_and_uses_only_the_public_api(example):
    text = example.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= MOST_LINES
    tree = ast.parse(text)
    assert ast.get_docstring(tree)
    private = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            private += [name.name for name in node.names if name.name.startswith("prism")]
        elif isinstance(node, ast.ImportFrom) and str(node.module).startswith("prism"):
            public = {*import_module(str(node.module)).__all__, "synth"}
            private += [name.name for name in node.names if name.name not in public]
            private.append(str(node.module))
    assert set(private) <= {"prismtrace", "prismcalib", "prismcalib.synth"}


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_entry_pages_link_the_examples(page, repo):
    assert "guides/examples.md" in (repo / page).read_text(encoding="utf-8")


def test_the_guide_names_every_example(repo):
    guide = (repo / "docs/guides/examples.md").read_text(encoding="utf-8")
    assert [path.name for path in EXAMPLES if f"examples/{path.name})" not in guide] == []
