"""Loading the plugin without a GPU: what is missing is named, and compiled code is kept."""

from __future__ import annotations

import importlib.util
import sys
import types

import pytest

from prismreplay.errors import PluginError, PluginUnavailableError
from prismreplay.plugin import compiling, device


@pytest.fixture
def compiler(monkeypatch, tmp_path):
    """A stand-in for NVRTC that counts its calls."""
    calls = []

    def compiled(name, text, arch, macros):
        calls.append((name, arch, macros))
        assert "__global__" in text
        return f"{name} {arch} {macros} {len(calls)}".encode()

    monkeypatch.setattr(compiling, "_compile", compiled)
    monkeypatch.setattr(compiling, "_compiler_version", lambda: "13.0")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return calls


def test_code_is_compiled_once(compiler, tmp_path):
    first = compiling.cubin("hold", "sm_90")
    assert compiling.cubin("hold", "sm_90") == first
    assert len(compiler) == 1
    assert [path.suffix for path in compiling.cache_folder().iterdir()] == [".cubin"]
    assert compiling.cache_folder() == tmp_path / "cache" / "prismllm" / "cubin"


def test_whatever_code_depends_on_makes_it_other_code(compiler, monkeypatch):
    one = compiling.cubin("ring", "sm_90", {"ELEMENT": "f32"})
    others = [
        compiling.cubin("ring", "sm_80", {"ELEMENT": "f32"}),
        compiling.cubin("ring", "sm_90", {"ELEMENT": "f16"}),
        compiling.cubin("compensate", "sm_90", {"ELEMENT": "f32"}),
    ]
    monkeypatch.setattr(compiling, "_compiler_version", lambda: "13.1")
    others.append(compiling.cubin("ring", "sm_90", {"ELEMENT": "f32"}))
    assert len({one, *others}) == 5
    assert len(compiler) == 5


def test_a_cache_that_cannot_be_written_is_done_without(compiler, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    compiling.cubin("hold", "sm_90")
    compiling.cubin("hold", "sm_90")
    assert len(compiler) == 2


def test_an_empty_file_in_the_cache_is_not_taken_for_code(compiler):
    compiling.cubin("hold", "sm_90")
    for path in compiling.cache_folder().iterdir():
        path.write_bytes(b"")
    assert compiling.cubin("hold", "sm_90")
    assert len(compiler) == 2


def test_without_cuda_python_the_hint_says_what_works(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(PluginUnavailableError) as caught:
        compiling.cubin("hold", "sm_90")
    assert "prismllm-toolkit[cuda]" in caught.value.hint
    assert "CPUs" in caught.value.hint


def test_without_sources_the_folder_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(compiling, "source_folder", lambda: tmp_path)
    with pytest.raises(PluginUnavailableError, match="sources are missing") as caught:
        compiling.cubin("hold", "sm_90")
    assert caught.value.where == str(tmp_path)


@pytest.mark.parametrize(
    ("torch", "message"),
    [
        (None, "torch is not installed"),
        ({"version": {"cuda": None}}, "built without CUDA"),
        ({"version": {"cuda": "13.0"}, "cuda": {"is_available": lambda: False}}, "no NVIDIA GPU"),
        (
            {
                "version": {"cuda": "13.0"},
                "cuda": {"is_available": lambda: True, "device_count": lambda: 1},
            },
            "no CUDA device 3",
        ),
    ],
)
def test_what_a_device_needs_is_named(monkeypatch, torch, message):
    fake = torch and types.SimpleNamespace(
        **{name: types.SimpleNamespace(**values) for name, values in torch.items()}
    )
    monkeypatch.setitem(sys.modules, "torch", fake)
    with pytest.raises(PluginUnavailableError, match=message) as caught:
        device.require_device(3)
    assert caught.value.hint


def _needs_nvrtc():
    if importlib.util.find_spec("cuda") is None or not importlib.util.find_spec("cuda.core"):
        pytest.skip("needs cuda-python: pip install 'prismllm-toolkit[cuda]'")
    try:
        compiling._compiler_version()
    except PluginError as error:
        pytest.skip(f"needs NVRTC: {error}")


@pytest.mark.parametrize(
    ("name", "defines"),
    [
        ("hold", {}),
        ("pace", {}),
        ("advance", {}),
        ("compensate", {"ELEMENT": "f8_e4m3", "INPUTS": 1, "MODE": 0, "PACKED": 1}),
        ("ring", {"ELEMENT": "bf16", "REDUCTION": 2}),
    ],
)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
def test_sources_compile(monkeypatch, tmp_path, name, defines, arch):
    _needs_nvrtc()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert compiling.cubin(name, arch, defines)[:4] == b"\x7fELF"


def test_a_source_that_does_not_compile_shows_the_log(monkeypatch, tmp_path):
    _needs_nvrtc()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(PluginError, match="element_f31") as caught:
        compiling.cubin("ring", "sm_90", {"ELEMENT": "f31"})
    assert "-DELEMENT=f31" in caught.value.where
