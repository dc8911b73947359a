"""The import borders, looked at from outside: fresh interpreters and their `sys.modules`.

The table itself stands in <package>/ruff.toml, which the linter enforces on the source text.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib

import pytest

PACKAGES = ("prismtrace", "prismcalib", "prismreplay")

# What no command may load before it knows what it is asked to do.
HEAVY = {"cuda", "msgspec", "networkx", "numba", "numpy", "polars", "pydantic", "torch"}

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
