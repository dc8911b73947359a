import json

import pytest
from pydantic import ValidationError

from prismtrace.schema import (
    CALIBRATED_COLUMNS,
    FORMAT_VERSION,
    MODELS,
    ClockDomain,
    ColumnType,
    DType,
    Edge,
    Kind,
    Node,
    ProcessGroup,
    TraceHeader,
    column_types,
    json_schema,
    nullable_columns,
)
from prismtrace.schema_files import schema_text, write_schemas

NODE = {"id": 1, "rank": 0, "index": 1, "kind": "compute", "stream": 0, "real": True, "deps": []}
COMM = {**NODE, "kind": "all_reduce", "group": 0}


def header(**changes):
    return TraceHeader(**{"kind": "recorded", "world_size": 8, "ranks": range(8), **changes})


def test_every_column_has_a_storage_type():
    assert list(column_types()) == list(Node.model_fields)
    assert all(isinstance(kind, ColumnType) for kind in column_types().values())


def test_only_identity_and_edges_are_required():
    required = set(Node.model_fields) - nullable_columns()
    assert required == {"id", "rank", "index", "kind", "stream", "real", "deps"}
    assert set(CALIBRATED_COLUMNS) <= nullable_columns()


def test_every_dtype_has_a_size():
    assert {dtype: dtype.itemsize for dtype in DType}[DType.BFLOAT16] == 2
    assert min(dtype.itemsize for dtype in DType) == 1


def test_kinds_know_what_they_are():
    assert [kind for kind in Kind if kind.is_p2p] == [Kind.SEND, Kind.RECV]
    assert [k for k in Kind if not k.is_communication] == [Kind.COMPUTE, Kind.MEMCPY]


def test_header_round_trips_through_json():
    full = header(
        axes={"tp": 8},
        groups=[ProcessGroup(id=3, name="dp_0", ranks=[0, 2, 4, 6])],
        clock=[ClockDomain(id=0, ranks=[0, 1], offset_ns=2**62)],
        streams={0: "7"},
        policies={"orphans": 3},
        extra={"note": [1, 2]},
    )
    text = full.model_dump_json()
    assert json.loads(text)["groups"][0]["ranks"] == "0-6/2"
    assert TraceHeader.model_validate_json(text) == full


def test_header_of_a_later_minor_version_is_read():
    raw = {**json.loads(header().model_dump_json()), "format_version": "1.9.0", "new_key": 1}
    assert TraceHeader.model_validate(raw).format_version == "1.9.0"
    assert header().format_version == FORMAT_VERSION


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ranks": [0, 0]}, "rank twice"),
        ({"ranks": [8]}, "outside the world"),
        ({"world_size": 0}, "greater than or equal to 1"),
        ({"groups": [ProcessGroup(id=0, name="a", ranks=[9])]}, "outside the world"),
        ({"groups": [ProcessGroup(id=0, name=name, ranks=[]) for name in "ab"]}, "same id"),
        ({"kind": "guessed"}, "bare"),
        ({"ranks": "0-x"}, "list of ranks"),
    ],
)
def test_broken_headers_are_refused(changes, message):
    with pytest.raises(ValidationError, match=message):
        header(**changes)


def test_steps_are_in_order_whatever_wrote_them():
    text = TraceHeader(kind="bare", world_size=1, ranks=(0,), steps=(2, 0, 1, 2)).model_dump_json()
    assert TraceHeader.model_validate_json(text).steps == (0, 1, 2)
    given = text.replace("[0,1,2]", "[2,1,1,0]")
    assert given != text
    assert TraceHeader.model_validate_json(given).steps == (0, 1, 2)


def test_a_group_lists_a_rank_once():
    with pytest.raises(ValidationError, match="twice"):
        ProcessGroup(id=0, name="tp_0", ranks=[1, 1])


def test_own_columns_start_with_x():
    assert Node(**NODE, x_note=1).model_extra == {"x_note": 1}
    with pytest.raises(ValidationError, match="unknown-column"):
        Node(**NODE, note=1)


@pytest.mark.parametrize(
    ("row", "rule"),
    [
        ({**NODE, "id": 2}, "id-mismatch"),
        ({**NODE, "group": 0}, "local-with-group"),
        ({**NODE, "seq": 0}, "local-with-group"),
        ({**NODE, "kind": "all_gather", "seq": 0}, "seq-without-group"),
        ({**COMM, "kind": "send"}, "p2p-without-peer"),
        ({**COMM, "kind": "recv", "peer": 0}, "p2p-with-itself"),
        ({**COMM, "peer": 1}, "peer-without-meaning"),
        ({**COMM, "kind": "all_gather", "reduce_op": "sum"}, "reduce-op-without-meaning"),
        ({**NODE, "start_ns": 0}, "half-timed"),
        ({**NODE, "start_ns": 1, "dur_ns": 2**63 - 1}, "end-out-of-range"),
        ({**NODE, "transfer_ns": 0}, "local-with-transfer"),
        ({**COMM, "start_ns": 0, "dur_ns": 1, "transfer_ns": 2}, "transfer-longer-than-span"),
        ({**NODE, "deps": [2]}, "dep-not-earlier"),
        ({**NODE, "deps": [0]}, "dep-not-earlier"),
        ({**NODE, "deps": [1, 1]}, "dep-twice"),
        ({**NODE, "xdeps": [0]}, "xdep-of-same-rank"),
        ({**NODE, "xdeps": [-1]}, "xdep-out-of-range"),
        ({**NODE, "lag_ns": [1]}, "lag-length"),
        ({**NODE, "deps": [1], "lag_ns": [-1]}, "lag-out-of-range"),
        ({**NODE, "mem_bytes": 2, "mem_peak_bytes": 1}, "peak-below-level"),
    ],
)
def test_rules_of_a_row(row, rule):
    with pytest.raises(ValidationError, match=rule):
        Node.model_validate(row)


def test_an_orphan_communication_has_no_seq():
    """Its partners lie outside the recorded window; it waits for nobody."""
    assert Node(**COMM).seq is None


def test_edges():
    assert Edge(src=1, dst=2, kind="sync").lag_ns == 0
    with pytest.raises(ValidationError):
        Edge(src=-1, dst=2, kind="sync")


def test_schema_files(tmp_path, repo):
    paths = write_schemas(tmp_path)
    assert [path.name for path in paths] == [f"{name}.schema.json" for name in MODELS]
    for path in paths:
        assert path.read_bytes() == (repo / "schemas" / path.name).read_bytes()
    assert json.loads(schema_text("node")) == json_schema("node")
    assert json_schema("trace-header")["properties"]["ranks"]["type"] == "string"
