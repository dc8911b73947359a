"""Files that are read as a whole are bounded, and say so in the words of their format."""

from __future__ import annotations

from collections import Counter

import pytest

from prismtrace.converters import content
from prismtrace.converters.chakra.feeder import read_feeder
from prismtrace.converters.flight.reading import read_dump
from prismtrace.converters.pytorch_et.reading import read_execution_trace
from prismtrace.errors import InputFileError


def feeder(path):
    return read_feeder([path.read_bytes()], where=str(path), counts=Counter())


@pytest.mark.parametrize(
    ("read", "name", "hint"),
    [
        (feeder, "a Chakra trace as JSON of more than 1 GiB", "protobuf form"),
        (read_execution_trace, "a PyTorch execution trace of more than 1 GiB", "fewer steps"),
        (read_dump, "it is larger than 1 GiB", "files that torch wrote"),
    ],
    ids=["feeder", "execution trace", "dump"],
)
def test_what_is_too_large_is_refused(tmp_path, monkeypatch, read, name, hint):
    monkeypatch.setattr(content, "_MOST_BYTES", 100)
    path = tmp_path / "large"
    path.write_bytes(b"[" * 101)
    with pytest.raises(InputFileError, match=name) as error:
        read(path)
    assert error.value.where == str(path)
    assert hint in (error.value.hint or "")


@pytest.mark.parametrize("read", [feeder, read_execution_trace])
@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"\xff", b"[" * 100_000, b'{"nodes": 3}'])
def test_what_is_something_else_is_refused(tmp_path, read, text):
    path = tmp_path / "other"
    path.write_bytes(text)
    with pytest.raises(InputFileError, match=r"^no .*, or cut off: ") as error:
        read(path)
    assert error.value.where == str(path)
    assert error.value.hint
