"""`__all__` is the public surface: all of it exists, it is sorted, and nothing else shows."""

from __future__ import annotations

import importlib
import types

import pytest

PACKAGES = ("prismtrace", "prismcalib", "prismreplay")


@pytest.mark.parametrize("package", PACKAGES)
def test_everything_in_all_exists(package):
    module = importlib.import_module(package)
    missing = [name for name in module.__all__ if not hasattr(module, name)]
    assert missing == []


@pytest.mark.parametrize("package", PACKAGES)
def test_all_is_sorted_and_without_duplicates(package):
    names = importlib.import_module(package).__all__
    assert list(names) == sorted(set(names))


@pytest.mark.parametrize("package", PACKAGES)
def test_nothing_of_ours_shows_beside_all(package):
    module = importlib.import_module(package)
    for name in module.__all__:  # resolves lazy names
        getattr(module, name)
    ours = {
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and not isinstance(value, types.ModuleType)
        and str(getattr(value, "__module__", "")).startswith(PACKAGES)
    }
    assert ours == set(module.__all__)
