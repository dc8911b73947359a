"""The TOML file that says what a log's columns and operations are."""

from __future__ import annotations

import pytest

from prismtrace.converters.ops.mapping import ColumnMapping, Origin, Scope, load_mapping
from prismtrace.errors import InputFileError, SourceFormatError
from prismtrace.schema import Kind, Phase


@pytest.fixture
def write(tmp_path):
    def make(text):
        path = tmp_path / "columns.toml"
        path.write_text(text, encoding="utf-8")
        return path

    return make


def test_without_a_file_the_default_holds():
    mapping = load_mapping(None)
    assert mapping == ColumnMapping()
    assert mapping.columns.operation == "optype"
    assert mapping.time.origin is Origin.STEP
    assert mapping.operations["params-all-gather"].scope is Scope.DP
    assert len(mapping.operations) == 13


def test_a_file_changes_what_it_names_and_nothing_else(write):
    mapping = load_mapping(
        write(
            """
            absent = 255
            [columns]
            operation = "event"
            end = "until"
            [time]
            unit = "us"
            origin = "run"
            [operations.fwd]
            kind = "compute"
            phase = "forward"
            [operations."ep-a2a"]
            kind = "all_to_all"
            scope = "world"
            blocking = true
            """
        )
    )
    assert (mapping.columns.operation, mapping.columns.start) == ("event", "start_ts")
    assert mapping.columns.span == "until"
    assert (mapping.time.unit.in_ns, mapping.absent) == (1000, 255)
    assert mapping.operations["fwd"].kind is Kind.COMPUTE
    assert mapping.operations["fwd"].phase is Phase.FORWARD
    assert mapping.operations["ep-a2a"].blocking
    assert "forward-compute" in mapping.operations


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[colums]\n", "colums"),
        ('[columns]\nstart_time = "x"\n', "columns.start_time"),
        ('[columns]\nduration = "d"\nend = "e"\n', "not both at columns"),
        ('[time]\nunit = "minutes"\n', "time.unit"),
        ('[operations.x]\nkind = "alltoall"\n', "operations.x.kind"),
        ('[operations.x]\nkind = "all_reduce"\n', "needs scope"),
        ('[operations.x]\nkind = "send"\n', "phase = 'forward' or 'backward'"),
        ('[operations.x]\nkind = "recv"\nphase = "forward"\nscope = "dp"\n', "leave scope out"),
        ('[operations.x]\nkind = "compute"\nscope = "dp"\n', "leave scope out"),
    ],
)
def test_what_makes_no_sense_is_named(write, text, says):
    with pytest.raises(SourceFormatError) as caught:
        load_mapping(write(text))
    assert says in caught.value.message
    assert caught.value.where.endswith("columns.toml")
    assert caught.value.hint


def test_a_file_that_cannot_be_read(write, tmp_path):
    with pytest.raises(InputFileError, match="not TOML"):
        load_mapping(write("[columns\n"))
    with pytest.raises(InputFileError, match="cannot be read"):
        load_mapping(tmp_path / "absent.toml")
