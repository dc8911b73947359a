"""Folders whose modules need torch are skipped, with the reason, where it is not installed."""

from __future__ import annotations

from importlib import util

import pytest

BESIDE_TORCH = {"collect", "run", "tensors"}


class _Skipped(pytest.Module):
    def collect(self):
        pytest.skip("needs torch: pip install 'prismllm-toolkit[replay]'", allow_module_level=True)


def pytest_pycollect_makemodule(module_path, parent):
    if module_path.parent.name in BESIDE_TORCH and util.find_spec("torch") is None:
        return _Skipped.from_parent(parent, path=module_path)
    return None
