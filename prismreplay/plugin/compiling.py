"""CUDA sources to machine code, once per GPU architecture: what was compiled is kept on disk.

NVRTC compiles in a few tenths of a second and needs neither a GPU nor a driver. The cache is
keyed by all that the code depends on, so nothing in it is ever out of date; files appear under
their names only when whole. Where the cache cannot be written, code is compiled each time.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from prismreplay.errors import PluginError, PluginUnavailableError
from prismtrace.errors import OutputError
from prismtrace.output import atomic_output

__all__ = ["cache_folder", "cubin", "source_folder"]

STILL_WORKS = "without it, emulation on CPUs and the `local` and `reduced` transports work"


def source_folder() -> Path:
    """The folder of the `.cu` files: inside the package when installed, else the repository's."""
    package = Path(__file__).resolve().parent.parent
    return next(
        (one for one in (package / "cuda", package.parent / "cuda") if one.is_dir()),
        package / "cuda",
    )


def cache_folder() -> Path:
    """Where compiled code is kept: `$XDG_CACHE_HOME/prismllm/cubin`, else in `~/.cache`."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "prismllm" / "cubin"


def cubin(name: str, arch: str, defines: Mapping[str, str | int] | None = None) -> bytes:
    """Machine code of `<name>.cu`.

    Args:
        name: of the source, without its ending.
        arch: such as sm_90.
        defines: macros.

    Raises:
        PluginUnavailableError: cuda-python or NVRTC is not installed.
        PluginError: the compiler refuses the source; the message has its log.
    """
    macros = [(key, str(value)) for key, value in sorted((defines or {}).items())]
    text = _read(name)
    version = _compiler_version()
    key = hashlib.sha256(repr((text, macros, arch, version)).encode()).hexdigest()[:32]
    path = cache_folder() / f"{name}-{arch}-{key}.cubin"
    with suppress(OSError):
        kept = path.read_bytes()
        if kept:
            return kept
    code = _compile(name, text[f"{name}.cu"], arch, macros)
    with suppress(OSError, OutputError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_output(path) as temporary:
            temporary.write_bytes(code)
    return code


def _read(name: str) -> dict[str, str]:
    """The source, and all headers: which of them it includes is for the compiler to know."""
    folder = source_folder()
    try:
        return {
            path.name: path.read_text(encoding="utf-8")
            for path in (folder / f"{name}.cu", *sorted(folder.glob("*.cuh")))
        }
    except OSError as error:
        raise PluginUnavailableError(
            "the plugin's CUDA sources are missing",
            where=str(folder),
            hint="install prismllm-toolkit anew",
        ) from error


def _compiler_version() -> str:
    try:
        from cuda.bindings import nvrtc

        status, major, minor = nvrtc.nvrtcVersion()
    except Exception as error:
        # An ImportError without cuda-python; without NVRTC, an error of cuda-python's loader.
        raise PluginUnavailableError(
            f"CUDA's compiler cannot be loaded: {error}",
            hint=f"pip install 'prismllm-toolkit[cuda]' nvidia-cuda-nvrtc; {STILL_WORKS}",
        ) from error
    if int(status) != 0:
        raise PluginError(
            f"nvrtcVersion failed: {status}",
            hint="install CUDA's compiler again: pip install --force-reinstall nvidia-cuda-nvrtc",
        )
    return f"{major}.{minor}"


def _compile(name: str, text: str, arch: str, macros: list[tuple[str, str]]) -> bytes:
    try:
        from cuda.core import Program, ProgramOptions
    except ImportError as error:
        raise PluginUnavailableError(
            f"cuda-python has no cuda.core: {error}",
            hint=f"pip install 'prismllm-toolkit[cuda]'; {STILL_WORKS}",
        ) from error
    macro: Any = macros or None
    try:
        options = ProgramOptions(
            name=f"{name}.cu",
            std="c++17",
            arch=arch,
            # Results must be the host's: every product and sum is rounded by itself.
            fma=False,
            lineinfo=True,
            define_macro=macro,
            include_path=str(source_folder()),
        )
        return bytes(Program(text, "c++", options).compile("cubin").code)
    except Exception as error:
        raise PluginError(
            f"{name}.cu does not compile for {arch}: {error}",
            where=" ".join(f"-D{key}={value}" for key, value in macros) or None,
            hint="report this with the version of nvidia-cuda-nvrtc",
        ) from error
