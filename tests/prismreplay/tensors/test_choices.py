from __future__ import annotations

import pytest

from prismreplay.errors import MockRouterError, TensorRecordingError, TensorRulesError
from prismreplay.tensors.choices import RecordTensors, read_choices
from prismreplay.tensors.recording import TensorRecorder
from tests.prismreplay.tensors.operations import op, spec

WORLD = (0, 1, 2, 3)


def test_nothing_is_supplied_or_recorded_by_default(tmp_path):
    choices = read_choices()
    assert choices.make_supplier(4) is None
    assert choices.make_recording(tmp_path / "bare.parquet", 4, {}) is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"record": "some"}, "--record-tensors is one of none, sandbox-facing, all, not some"),
        ({"record": "sandbox-facing"}, "needs --sandbox"),
        ({"record": "all", "sandbox": (1,)}, "only that needs it"),
    ],
)
def test_options_that_contradict_each_other(options, message):
    with pytest.raises(ValueError, match=message):
        read_choices(**options)


def test_files_are_read_before_anything_runs(tmp_path):
    with pytest.raises(TensorRulesError, match="no such file"):
        read_choices(tensors=[str(tmp_path / "absent")])
    with pytest.raises(MockRouterError, match="no such file"):
        read_choices(mock_router=tmp_path / "absent.toml")


def test_sources_are_asked_in_order(tmp_path):
    for name, text in (("one", "kind = 'barrier'\nproduce = 'keep'"), ("two", "produce = 'zeros'")):
        (tmp_path / f"{name}.toml").write_text(f"[[rule]]\n{text}\n")
    choices = read_choices(tensors=[str(tmp_path / f"{name}.toml") for name in ("one", "two")])
    supplier = choices.make_supplier(4)
    assert list(supplier.supply(0, op("barrier", WORLD, 0), [])) == []
    made = supplier.supply(0, op("recv", WORLD, 0, outputs=[spec(2)], peer=1), [])
    assert made[0].tolist() == [0, 0]


def test_a_rule_may_point_to_the_recording_beside_it(tmp_path):
    writing = TensorRecorder(tmp_path / "t", choice=RecordTensors.ALL, world_size=4)
    writing.close()
    (tmp_path / "rules.toml").write_text("[[rule]]\nkind = 'barrier'\nproduce = 'recorded'\n")
    rules = str(tmp_path / "rules.toml")
    assert read_choices(tensors=[rules, str(tmp_path / "t")]).make_supplier(4) is not None
    with pytest.raises(TensorRulesError, match="needs a recording"):
        read_choices(tensors=[rules]).make_supplier(4)
    with pytest.raises(TensorRecordingError, match="recorded with 4 ranks"):
        read_choices(tensors=[str(tmp_path / "t")]).make_supplier(8)


def test_interrupted_recordings_keep_what_there_is(tmp_path):
    choices = read_choices(record="all")
    first = choices.make_recording(tmp_path / "bare.parquet", 4, {"program": "train.py"})
    assert first.close(complete=False) is None
    assert list(tmp_path.iterdir()) == []
