from __future__ import annotations

import json
import os
import shutil

import polars as pl
import pytest
import torch
from safetensors.torch import load_file

from prismreplay.errors import TensorRecordingError
from prismreplay.tensors.choices import RecordTensors
from prismreplay.tensors.recorded import RecordedTensors
from prismreplay.tensors.recording import TensorRecorder
from prismreplay.tensors.shards import HEADER_BYTES, ShardWriter
from prismtrace.errors import OutputError
from tests.full_disks import room_for
from tests.prismreplay.tensors.operations import op, spec

WORLD = (0, 1, 2, 3)


def recorder(tmp_path, **more):
    options = {"choice": RecordTensors.ALL, "world_size": 4, **more}
    return TensorRecorder(tmp_path / "run.tensors", **options)


def all_reduce(rank, seq, tensor, ranks=WORLD, name="0"):
    own = spec(*tensor.shape, dtype=str(tensor.dtype).removeprefix("torch."))
    return op("all_reduce", ranks, rank, inputs=[own], outputs=[own], seq=seq, name=name)


def test_what_was_recorded_comes_back(tmp_path):
    writing = recorder(tmp_path)
    tensors = {}
    for seq, dtype in enumerate(
        ["float64", "float32", "bfloat16", "float8_e5m2", "int64", "uint8", "bool", "complex64", "complex128",
         "float8_e8m0fnu", "uint16"]
    ):  # fmt: skip
        for rank in WORLD:
            tensor = (torch.randn(3, 5) * (rank + 1)).to(getattr(torch, dtype))
            tensors[rank, seq] = tensor
            writing.record(rank, all_reduce(rank, seq, tensor), [tensor])
    summary = writing.close()
    assert summary.complete
    assert (summary.operations, summary.shards) == (44, 1)
    found = RecordedTensors(summary.folder)
    for (rank, seq), tensor in tensors.items():
        (again,) = found.inputs(rank, "0/0", seq)
        assert again.dtype == tensor.dtype
        assert again.shape == tensor.shape
        assert bytes(again.view(torch.uint8).flatten().tolist()) == bytes(
            tensor.view(torch.uint8).flatten().tolist()
        )
        found.require_equal(rank, all_reduce(rank, seq, tensor), [tensor])
    # Any reader of the format opens it.
    assert len(load_file(summary.folder / "shard-00000.safetensors")) >= 40


def test_equal_tensors_are_stored_once(tmp_path):
    writing = recorder(tmp_path)
    for seq in range(10):
        for rank in WORLD:
            writing.record(rank, all_reduce(rank, seq, torch.ones(1000)), [torch.ones(1000)])
    summary = writing.close()
    assert (summary.tensors, summary.nbytes, summary.stored_bytes) == (40, 160_000, 4000)


def test_equal_bytes_of_another_type_are_another_tensor(tmp_path):
    writing = recorder(tmp_path)
    for seq, tensor in enumerate(
        (torch.zeros(4), torch.zeros(4, dtype=torch.int32), torch.zeros(2, 2))
    ):
        writing.record(0, all_reduce(0, seq, tensor), [tensor])
    found = RecordedTensors(writing.close().folder)
    assert [found.inputs(0, "0/0", seq)[0].dtype for seq in range(3)] == [
        torch.float32,
        torch.int32,
        torch.float32,
    ]
    assert found.inputs(0, "0/0", 2)[0].shape == (2, 2)


def test_shards_stay_small_and_equal_tensors_are_found_in_earlier_ones(tmp_path):
    writing = recorder(tmp_path, shard_bytes=10_000)
    for seq in range(12):
        tensor = torch.full((1000,), float(seq % 6))
        writing.record(0, all_reduce(0, seq, tensor), [tensor])
    summary = writing.close()
    assert summary.shards >= 3
    sizes = [path.stat().st_size for path in summary.folder.glob("*.safetensors")]
    assert max(sizes) <= HEADER_BYTES + 8 + 10_000
    found = RecordedTensors(summary.folder)
    assert [found.inputs(0, "0/0", seq)[0][0].item() for seq in range(12)] == [*range(6)] * 2


def test_a_shard_ends_when_its_header_is_full(tmp_path):
    writer = ShardWriter(tmp_path / "shard.safetensors")
    count = 0
    while writer.fits(f"{count:064x}", spec(1)):
        writer.add(f"{count:064x}", torch.ones(1), spec(1))
        count += 1
    writer.close()
    assert count > 3000
    assert (
        len([key for key in load_file(tmp_path / "shard.safetensors") if not key.startswith("gap")])
        == count
    )


def test_p2p_empty_and_several_inputs(tmp_path):
    writing = recorder(tmp_path)
    send = op("send", WORLD, 1, inputs=[spec(2)], seq=5, peer=3)
    writing.record(1, send, [torch.tensor([1.0, 2])])
    several = op(
        "all_to_all", WORLD, 0, inputs=[spec(0), spec(1), spec(2), spec(3)], outputs=[spec(1)] * 4
    )
    assert writing.wants(0, several)
    writing.record(0, several, [torch.zeros(n) + n for n in range(4)])
    assert not writing.wants(0, op("recv", WORLD, 3, outputs=[spec(2)], peer=1))
    found = RecordedTensors(writing.close().folder)
    assert found.sent("0/0", 1, 3, 5)[0].tolist() == [1, 2]
    assert [t.tolist() for t in found.inputs(0, "0/0", 0)] == [[], [1], [2, 2], [3, 3, 3]]
    with pytest.raises(
        TensorRecordingError, match=r"holds no tensors of rank=1 group=\[0-3\] seq=5 to=2"
    ):
        found.sent("0/0", 1, 2, 5)


def test_sandbox_facing(tmp_path):
    writing = recorder(tmp_path, choice=RecordTensors.SANDBOX_FACING, sandbox=[1])
    one = torch.ones(1)
    assert writing.wants(0, all_reduce(0, 0, one))
    assert writing.wants(0, all_reduce(0, 0, one, ranks=(0, 1), name="1"))
    assert not writing.wants(2, all_reduce(2, 0, one, ranks=(2, 3), name="1"))
    assert writing.wants(0, op("send", WORLD, 0, inputs=[spec(1)], peer=1))
    assert not writing.wants(0, op("send", WORLD, 0, inputs=[spec(1)], peer=2))
    found = RecordedTensors(writing.close().folder)
    with pytest.raises(TensorRecordingError, match="it holds what concerns the sandbox ranks 1"):
        found.inputs(2, "0/1", 0)


@pytest.mark.parametrize("whole_shards", [0, 2])
def test_a_full_disk_keeps_whole_shards_or_nothing(whole_shards, tmp_path):
    writing = recorder(tmp_path, shard_bytes=4_000)
    for seq in range(whole_shards):
        tensor = torch.full((1000,), float(seq))
        writing.record(0, all_reduce(0, seq, tensor), [tensor])
    large = torch.zeros(100_000)
    with room_for(HEADER_BYTES + 50_000):
        with pytest.raises(OutputError, match="too large"):
            writing.record(0, all_reduce(0, 9, large), [large])
        kept = writing.close_interrupted()
    if not whole_shards:
        assert kept is None
        assert list(tmp_path.iterdir()) == []
        return
    assert [path.name for path in tmp_path.iterdir()] == ["run.partial.tensors"]
    found = RecordedTensors(kept.folder)
    assert not found.complete
    assert [found.inputs(0, "0/0", seq)[0][0].item() for seq in range(2)] == [0, 1]
    assert not list(kept.folder.glob(".*"))


def test_an_interrupted_recording_is_read_up_to_its_last_shard(tmp_path):
    writing = recorder(tmp_path, shard_bytes=10_000)
    for seq in range(9):
        tensor = torch.full((1000,), float(seq))
        writing.record(0, all_reduce(0, seq, tensor), [tensor])
    assert not (tmp_path / "run.tensors").exists()
    (draft,) = tmp_path.glob(".run.tensors.*.tmp")
    copy = shutil.copytree(draft, tmp_path / "killed")
    writing.discard()
    assert list(tmp_path.iterdir()) == [copy]
    found = RecordedTensors(copy)
    assert not found.complete
    assert found.inputs(0, "0/0", 0)[0][0].item() == 0
    with pytest.raises(TensorRecordingError, match="interrupted"):
        found.inputs(0, "0/0", 8)


def test_only_recordings_are_replaced(tmp_path):
    recorder(tmp_path).close()
    writing = recorder(tmp_path)
    writing.record(0, all_reduce(0, 0, torch.ones(1)), [torch.ones(1)])
    writing.close()
    assert RecordedTensors(tmp_path / "run.tensors").has(0, "0/0", 0)
    (tmp_path / "run.tensors" / "manifest.json").write_text('{"mine": 1}')
    with pytest.raises(OutputError, match="holds something else"):
        recorder(tmp_path)
    with pytest.raises(OutputError):
        TensorRecorder(tmp_path / "no" / "folder", choice=RecordTensors.ALL, world_size=4)


def _written(tmp_path):
    writing = recorder(tmp_path)
    for rank in WORLD:
        tensor = torch.arange(1000) + rank
        writing.record(rank, all_reduce(rank, 0, tensor), [tensor])
    return writing.close().folder


def _make_a_pipe(path):
    path.unlink()
    os.mkfifo(path)


def _change_manifest(folder, **change):
    path = folder / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda folder: (folder / "shard-00000.safetensors").unlink(),
            "shard 0 is missing or damaged",
        ),
        (
            lambda folder: (folder / "shard-00000.safetensors").write_bytes(b"no"),
            "shard 0 is missing or damaged",
        ),
        # Pipes would be waited for.
        *(
            (lambda folder, name=name: _make_a_pipe(folder / name), "pipe")
            for name in ("shard-00000.safetensors", "index-00000.parquet", "manifest.json")
        ),
        *(
            (lambda folder, change=change: _change_manifest(folder, **change), "damaged")
            for change in ({"groups": {"0/0": 3}}, {"sandbox": "x"}, {"parts": "many"})
        ),
        (
            lambda folder: (folder / "index-00000.parquet").unlink(),
            "index-00000.parquet is missing or damaged",
        ),
        (
            lambda folder: (folder / "index-00000.parquet").write_bytes(b"PAR1"),
            "index-00000.parquet is missing",
        ),
        (
            lambda folder: pl.DataFrame({"a": [1]}).write_parquet(folder / "index-00000.parquet"),
            "other columns",
        ),
        (lambda folder: (folder / "manifest.json").unlink(), "no recording of tensors"),
        (lambda folder: (folder / "manifest.json").write_text("{"), "damaged"),
        (lambda folder: (folder / "manifest.json").write_text("[]"), "not a recording"),
        (
            lambda folder: (folder / "manifest.json").write_text(
                '{"format": "prismreplay-tensors/9"}'
            ),
            "tensors/9",
        ),
        (
            lambda folder: (folder / "manifest.json").write_text(
                '{"format": "prismreplay-tensors/1"}'
            ),
            "damaged",
        ),
    ],
)
def test_damage_is_told(tmp_path, damage, message):
    folder = _written(tmp_path)
    damage(folder)
    with pytest.raises(TensorRecordingError, match=message) as caught:
        RecordedTensors(folder).inputs(0, "0/0", 0)
    assert str(folder) in caught.value.where
    assert caught.value.hint


def test_a_flipped_bit_is_found(tmp_path):
    folder = _written(tmp_path)
    shard = folder / "shard-00000.safetensors"
    data = bytearray(shard.read_bytes())
    data[HEADER_BYTES + 8 + 100] ^= 1
    shard.write_bytes(data)
    with pytest.raises(TensorRecordingError, match="checksum"):
        RecordedTensors(folder).inputs(0, "0/0", 0)
    assert RecordedTensors(folder, verify=False).inputs(0, "0/0", 0)


def test_recordings_of_other_jobs_are_refused(tmp_path):
    found = RecordedTensors(_written(tmp_path))
    assert json.loads((found.folder / "manifest.json").read_text())["groups"] == {"0/0": "0-3"}
    found.require_job(world_size=4, groups={"0/0": WORLD, "0/9": (1, 2)})
    with pytest.raises(TensorRecordingError, match="recorded with 4 ranks, and this job has 8"):
        found.require_job(world_size=8)
    with pytest.raises(TensorRecordingError, match="group 0/0 had the ranks"):
        found.require_job(world_size=4, groups={"0/0": (0, 1)})
    other = torch.arange(1000) + 1
    with pytest.raises(TensorRecordingError, match="is not what was recorded"):
        found.require_equal(0, all_reduce(0, 0, other), [other])
    with pytest.raises(
        TensorRecordingError, match=r"recorded as all_reduce of int64\[1000\], and .* float32\[2\]"
    ):
        found.require_equal(0, all_reduce(0, 0, torch.ones(2)), [torch.ones(2)])
