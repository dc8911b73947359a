"""The import borders, looked at from outside: fresh interpreters and their `sys.modules`.

The table itself stands in <package>/ruff.toml, which the linter enforces on the source text.
Within `prismreplay` the folders have an order, too, which is written here.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import tomllib

import pytest

PACKAGES = ("prismtrace", "prismcalib", "prismreplay")

# What no command may load before it knows what it is asked to do.
HEAVY = {"cuda", "msgspec", "networkx", "numba", "numpy", "polars", "pydantic", "torch"}

# What stands below each folder of prismreplay, and may be imported in it, functions included.
# Collecting hands tensors on, and rules about tensors answer collecting: these two are one layer.
BELOW = {
    "plugin": set(),
    "runtime": set(),
    "collect": {"runtime", "tensors"},
    "tensors": {"runtime", "collect"},
    "comm_bench": {"runtime", "collect"},
    "run": {"plugin", "runtime", "collect", "tensors"},
    "slicing": {"runtime", "collect", "tensors", "run"},
    "emulation": {"runtime", "collect", "tensors", "comm_bench", "run", "slicing"},
}

IMPORT_ALL = """
import importlib, json, pkgutil, sys
package = importlib.import_module({package!r})
for module in pkgutil.walk_packages(package.__path__, {package!r} + "."):
    if not module.name.startswith({beside_torch!r}):
        importlib.import_module(module.name)
print(json.dumps(sorted({{name.partition(".")[0] for name in sys.modules}})))
"""


def _loaded(code: str) -> set[str]:
    answer = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    return set(json.loads(answer.stdout))


@pytest.mark.parametrize("package", PACKAGES)
def test_no_module_of_a_package_loads_what_the_package_must_not(package, repo):
    rules = tomllib.loads((repo / package / "ruff.toml").read_text())["lint"]
    tidy = rules["flake8-tidy-imports"]
    forbidden = {*tidy["banned-api"], *tidy.get("banned-module-level-imports", [])}
    # Folders whose modules run beside the program's own torch.
    beside_torch = tuple(
        f"{package}.{pattern.partition('/')[0]}."
        for pattern, codes in rules.get("per-file-ignores", {}).items()
        if "TID253" in codes
    )
    code = IMPORT_ALL.format(package=package, beside_torch=beside_torch)
    assert _loaded(code) & forbidden == set()


@pytest.mark.parametrize("package", PACKAGES)
def test_importing_a_package_is_cheap(package):
    code = f"import {package}, json, sys; print(json.dumps(list(sys.modules)))"
    assert _loaded(code) & HEAVY == set()


@pytest.mark.parametrize("package", PACKAGES)
def test_help_loads_nothing_heavy(package):
    answer = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", f"{package}.cli", "--help"],
        capture_output=True,
        text=True,
        check=True,
    )
    lines = [line.rpartition("|")[2].strip() for line in answer.stderr.splitlines()]
    assert {name.partition(".")[0] for name in lines} & HEAVY == set()


def _imported(source: str) -> set[str]:
    """Folders of prismreplay that a module's text names in imports, wherever these stand."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names |= {f"{node.module}.{one.name}" for one in node.names}
        elif isinstance(node, ast.Import):
            names |= {one.name for one in node.names}
    parts = [name.split(".") for name in names]
    return {found[1] for found in parts if found[0] == "prismreplay" and found[1:]}


def test_folders_of_prismreplay_import_what_stands_below_them(repo):
    folders = {path.parent.name for path in (repo / "prismreplay").glob("*/__init__.py")}
    assert folders == set(BELOW)
    upward = {
        f"{path.relative_to(repo)} imports {other}"
        for folder, below in BELOW.items()
        for path in (repo / "prismreplay" / folder).rglob("*.py")
        for other in _imported(path.read_text(encoding="utf-8")) & set(BELOW)
        if other not in below | {folder}
    }
    assert upward == set()
