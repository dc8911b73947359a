"""Frames are read as the protobuf library reads them, whatever the blocks they come in."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prismtrace.converters.chakra.frames import read_frames
from prismtrace.converters.chakra.messages import message_class
from prismtrace.converters.chakra.nodes import INTEGERS, TEXTS, UNKNOWN
from prismtrace.converters.chakra.wire import Block, Spans
from prismtrace.errors import InputFileError, SourceFormatError
from tests.prismtrace.chakra_traces import attribute, framed, metadata, node

ids = st.integers(0, 2**64 - 1)
times = st.integers(0, 2**62)
values = st.one_of(
    st.booleans(),
    st.text(max_size=5),
    st.integers(-(2**63), 2**63 - 1),
    st.tuples(st.just("uint64_val"), ids),
    st.tuples(st.just("int32_val"), st.integers(-(2**31), 2**31 - 1)),
    st.tuples(st.just("uint32_val"), st.integers(0, 2**32 - 1)),
    st.tuples(st.just("sint64_val"), st.integers(-(2**63), 2**63 - 1)),
    st.tuples(st.just("sint32_val"), st.integers(-(2**31), 2**31 - 1)),
)
names = st.sampled_from([*INTEGERS, *TEXTS, "op_schema", "comm_priority"])


@st.composite
def nodes(draw):
    return node(
        draw(ids),
        draw(st.integers(0, 12)),
        draw(st.text(max_size=8)),
        data=draw(st.lists(ids, max_size=4)),
        ctrl=draw(st.lists(ids, max_size=2)),
        start=draw(times),
        dur=draw(times),
        **draw(st.dictionaries(names, values, max_size=4)),
    )


def signed(value):
    return value - 2**64 if value >= 2**63 else value


def expected(message, name):
    """What the library makes of an attribute, as a 64-bit integer or a text."""
    for item in message.attr:
        if item.name == name:
            value = getattr(item, item.WhichOneof("value") or "name")
            if name in TEXTS:
                return value if isinstance(value, str) else None
            return UNKNOWN if isinstance(value, str) else signed(int(value))
    return None if name in TEXTS else UNKNOWN


def read(*messages, size=1 << 20):
    text = framed(*messages)
    blocks = [text[at : at + size] for at in range(0, len(text), size)]
    return read_frames(blocks, where="x.et", counts=Counter())


@settings(max_examples=150)
@given(st.lists(nodes(), min_size=1, max_size=40), st.integers(1, 300), st.booleans())
def test_columns_are_what_the_library_reads(messages, size, headed):
    first = [metadata(schema="1.0.1")] if headed else []
    found = read(*first, *messages, size=size).nodes
    told = [message_class("Node").FromString(message) for message in messages]
    # An empty frame ends a file; a node of zeros without a name is written as one.
    until = next((k for k, message in enumerate(messages) if not message), len(messages))
    told = told[:until]
    assert found.id.tolist() == [signed(message.id) for message in told]
    assert found.type.tolist() == [message.type for message in told]
    assert found.name == [message.name for message in told]
    assert found.start_us.tolist() == [message.start_time_micros for message in told]
    assert found.dur_us.tolist() == [message.duration_micros for message in told]
    for owner, dep, name in (
        (found.data_owner, found.data_dep, "data_deps"),
        (found.ctrl_owner, found.ctrl_dep, "ctrl_deps"),
    ):
        pairs = [(k, signed(d)) for k, message in enumerate(told) for d in getattr(message, name)]
        assert list(zip(owner.tolist(), dep.tolist(), strict=True)) == pairs
    for name in INTEGERS:
        column = found.numbers.get(name, np.full(len(told), UNKNOWN)).tolist()
        assert column == [expected(message, name) for message in told]
    for name in TEXTS:
        column = found.texts.get(name, [None] * len(told))
        assert column == [expected(message, name) for message in told]


def test_lists_that_are_not_packed_are_read_too():
    plain = b"\x08\x05\x12\x01a\x18\x04" + b"\x28\x01\x28\x02" + b"\x20\x03"
    found = read(plain).nodes
    assert (found.data_dep.tolist(), found.ctrl_dep.tolist()) == ([1, 2], [3])


def test_many_fields_in_few_messages_are_read_one_after_the_other():
    plain = b"\x08\x05\x12\x01a\x18\x04" + b"\x28\x01" * 3000
    assert read(plain).nodes.data_dep.tolist() == [1] * 3000


def test_the_metadata_is_told_from_a_node_without_an_id():
    assert read(node(0, title="first")).nodes.name == ["first"]
    assert read(metadata(pid=3), node(0, title="first")).metadata == {"pid": 3}
    assert read(metadata(), node(4)).nodes.id.tolist() == [4]


def test_what_a_damaged_file_has_is_counted():
    text = framed(metadata(), node(0), node(1))
    counts = Counter()
    found = read_frames([text[:-3]], where="x.et", counts=counts)
    assert (len(found.nodes), counts["truncated"]) == (1, 1)
    counts = Counter()
    found = read_frames([framed(node(1)), b"\0", framed(node(2))], where="x", counts=counts)
    assert (len(found.nodes), counts["empty-frame"]) == (1, 1)


def test_a_frame_that_is_no_node_is_refused_or_ends_the_file():
    text = framed(node(1), b"\x08\x01\x0b\x01", node(2))
    with pytest.raises(InputFileError, match="frame 1 is no node"):
        read_frames([text], where="x.et", counts=Counter())
    counts = Counter()
    found = read_frames([text], where="x.et", counts=counts, recover=True)
    assert (found.nodes.id.tolist(), counts["dropped-unreadable"]) == ([1], 1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"\xff\xff\xff\xff\xff\xff\x01", "no number"),
        (b"\xff\xff\xff\xff\x07" + b"x" * 20, "one node has at most"),
        (framed(node(1) + b"\x3a\x01\x05" + b"\x28\xff"), "no node"),
        (framed(node(1) + b"\x2a\x02\x01\x80"), "no node"),
        (framed(node(1) + b"\x52\x03\x0a\x09x"), "no node"),
        (framed(node(1) + b"\x38" + b"\xff" * 9 + b"\x01"), "no node"),
    ],
    ids=["length", "huge", "varint", "packed", "attribute", "duration"],
)
def test_damage_is_named(text, message):
    with pytest.raises(InputFileError, match=message) as error:
        read_frames([text], where="x.et", counts=Counter())
    assert error.value.where == "x.et"
    assert error.value.hint


def test_traces_of_the_first_versions_are_refused():
    # attribute = 11, with the type of its value in field 2
    old = b"\x08\x01\x12\x01a\x18\x07" + b"\x5a\x0f" + b"\x0a\x09comm_type\x10\x02\x30\x00"
    with pytest.raises(SourceFormatError, match=r"0\.0\.1"):
        read(old)


def test_fields_of_no_messages_are_none():
    fields, bad = Block(b"").fields(Spans(np.zeros(0, np.int64), np.zeros(0, np.int64)))
    assert (fields.tags, len(bad)) == (set(), 0)
    assert attribute("involved_dim", ("bool_list", [True])).bool_list.values == [True]
