from __future__ import annotations

import re

import pytest
import torch

from prismreplay.collect.supplying import AllOrNone, FirstOf
from prismreplay.errors import MismatchError, TensorRulesError
from prismreplay.tensors.by_rules import RuleSupplier
from prismreplay.tensors.rules import builtin_names, read_rules
from tests.prismreplay.tensors.operations import op, spec

WORLD = (0, 1, 2, 3)


def supplier(tmp_path, text, recorded=None):
    path = tmp_path / "rules.toml"
    path.write_text(text)
    return RuleSupplier(read_rules(path), recorded or (str))


def refused(tmp_path, text):
    path = tmp_path / "rules.toml"
    path.write_text(text)
    with pytest.raises(TensorRulesError) as caught:
        read_rules(path)
    return str(caught.value).replace(f"{path}", "F")


def test_the_first_rule_that_holds_counts(tmp_path):
    rules = supplier(
        tmp_path,
        """
        [[rule]]
        kind = "broadcast"
        dtype = "int64"
        max_bytes = 8
        constant = 7
        [[rule]]
        kind = ["broadcast", "all_gather"]
        produce = "zeros"
        """,
    )
    small = op("broadcast", WORLD, 1, outputs=[spec(1, dtype="int64")], root=0)
    large = op("broadcast", WORLD, 1, outputs=[spec(9, dtype="int64")], root=0)
    assert rules.supply(1, small, [])[0].tolist() == [7]
    assert rules.supply(1, large, [])[0].tolist() == [0] * 9
    assert (
        rules.supply(1, op("all_reduce", WORLD, 1, inputs=[spec(2)], outputs=[spec(2)]), []) is None
    )


def test_a_kind_stands_for_all_its_forms_and_a_form_for_itself(tmp_path):
    gather = op("all_gather_single", WORLD, 0, inputs=[spec(1)], outputs=[spec(4)])
    one = [torch.ones(1)]
    assert supplier(tmp_path, '[[rule]]\nkind="all_gather"\nproduce="own"').supply(0, gather, one)
    form = supplier(tmp_path, '[[rule]]\nkind="all_gather_single"\nproduce="own"')
    assert form.supply(0, gather, one)
    listed = op("all_gather", WORLD, 0, inputs=[spec(1)], outputs=[spec(1)] * 4)
    assert form.supply(0, listed, one) is None


@pytest.mark.parametrize(
    ("criterion", "fits"),
    [
        ('axis = "tp"', True),
        ('axis = ["dp", "pp"]', False),
        ('group = "mesh_*"', True),
        ('group = "world*"', False),
        ('shape = [2, "*"]', True),
        ("shape = [2]", False),
        ("shape = [2, 4]", False),
        ("min_bytes = 24\nmax_bytes = 24", True),
        ("min_bytes = 25", False),
        ('rank = "0-1"', True),
        ("rank = 2", False),
        ('step = "3-4"', True),
        ("step = 5", False),
        ("in_step = true", True),
        ("in_step = false", False),
        ("root = 0", True),
        ("root = 1", False),
        ('dtype = ["float16", "float32"]', True),
        ('dtype = "int8"', False),
    ],
)
def test_criteria(tmp_path, criterion, fits):
    rules = supplier(tmp_path, f"[[rule]]\n{criterion}\nproduce = 'zeros'")
    found = op("broadcast", WORLD, 1, outputs=[spec(2, 3)], desc="mesh_tp", root=0, step=3)
    assert (rules.supply(1, found, []) is not None) == fits


def test_a_send_is_decided_as_its_receive(tmp_path):
    rules = supplier(
        tmp_path, '[[rule]]\nkind = "p2p"\nrank = 3\npeer = 1\nshape = [5]\nproduce = "zeros"'
    )
    receive = op("recv", WORLD, 3, outputs=[spec(5)], peer=1)
    send = op("send", WORLD, 1, inputs=[spec(5)], peer=3)
    other = op("send", WORLD, 1, inputs=[spec(5)], peer=2)
    assert rules.supply(3, receive, [])[0].shape == (5,)
    assert list(rules.supply(1, send, [torch.ones(5)])) == []
    assert rules.supply(1, other, [torch.ones(5)]) is None


def test_a_receive_from_anyone_is_performed(tmp_path):
    rules = supplier(tmp_path, '[[rule]]\nproduce = "zeros"')
    assert rules.supply(3, op("recv", WORLD, 3, outputs=[spec(5)], seq=None), []) is None


def test_the_same_numbers_in_every_run_and_on_all_members_of_a_broadcast(tmp_path):
    rules = supplier(tmp_path, "[[rule]]\nuniform = [3, 10]")
    made = [
        rules.supply(
            rank, op("broadcast", WORLD, rank, outputs=[spec(99, dtype="int64")], root=0), []
        )[0]
        for rank in (1, 2)
    ]
    assert torch.equal(*made)
    assert made[0].min() >= 3
    assert made[0].max() < 10
    later = rules.supply(
        1, op("broadcast", WORLD, 1, outputs=[spec(99, dtype="int64")], root=0, seq=1), []
    )
    assert not torch.equal(made[0], later[0])
    scattered = [
        rules.supply(rank, op("scatter", WORLD, rank, outputs=[spec(99)], root=0), [])[0]
        for rank in (1, 2)
    ]
    assert not torch.equal(*scattered)


def test_what_the_rank_itself_contributes_stays(tmp_path):
    rules = supplier(tmp_path, '[[rule]]\nproduce = "zeros"')
    mine = torch.tensor([5.0])
    gathered = rules.supply(
        2, op("all_gather_single", WORLD, 2, inputs=[spec(1)], outputs=[spec(4)]), [mine]
    )
    assert gathered[0].tolist() == [0, 0, 5, 0]
    listed = rules.supply(
        2, op("all_gather", WORLD, 2, inputs=[spec(1)], outputs=[spec(1)] * 4), [mine]
    )
    assert [t.item() for t in listed] == [0, 0, 5, 0]
    sent = torch.tensor([1.0, 2, 3, 4, 5])
    uneven = op(
        "all_to_all_single", WORLD, 2, inputs=[spec(5)], outputs=[spec(4)],
        input_splits=(1, 1, 2, 1), output_splits=(1, 0, 2, 1),
    )  # fmt: skip
    assert rules.supply(2, uneven, [sent])[0].tolist() == [0, 3, 4, 0]
    root = op("broadcast", WORLD, 0, inputs=[spec(1)], outputs=[spec(1)], root=0)
    assert list(rules.supply(0, root, [mine])) == [None]
    assert list(rules.supply(0, op("barrier", WORLD, 0), [])) == []


def test_own_is_what_all_partners_would_send_if_they_did_as_this_rank(tmp_path):
    rules = supplier(tmp_path, '[[rule]]\nproduce = "own"')
    counts = torch.tensor([1, 2, 3, 4])
    even = op(
        "all_to_all_single",
        WORLD,
        2,
        inputs=[spec(4, dtype="int64")],
        outputs=[spec(4, dtype="int64")],
    )
    assert rules.supply(2, even, [counts])[0].tolist() == [3, 3, 3, 3]
    reduced = rules.supply(
        2,
        op("reduce_scatter_single", WORLD, 2, inputs=[spec(4)], outputs=[spec(1)]),
        [counts.float()],
    )
    assert reduced[0].tolist() == [3]
    gathered = rules.supply(
        1,
        op("all_gather_single", WORLD, 1, inputs=[spec(2)], outputs=[spec(8)]),
        [torch.tensor([1.0, 2])],
    )
    assert gathered[0].tolist() == [1, 2] * 4
    with pytest.raises(TensorRulesError, match="recv takes nothing from this rank"):
        rules.supply(2, op("recv", WORLD, 2, outputs=[spec(1)], peer=0), [])


def test_functions_make_tensors(tmp_path):
    (tmp_path / "making.py").write_text(
        "import torch\n"
        "def ranks(asked):\n"
        "    return [torch.full(s.shape, float(asked.rank)) for s in asked.op.outputs]\n"
        "def wrong(asked):\n"
        "    return torch.zeros(3)\n"
        "def broken(asked):\n"
        "    return 1 // 0\n"
    )
    receive = op("recv", WORLD, 3, outputs=[spec(2)], peer=1)
    assert supplier(tmp_path, '[[rule]]\npython = "making:ranks"').supply(3, receive, [])[
        0
    ].tolist() == [3, 3]
    with pytest.raises(TensorRulesError, match=r"returned .* is expected .*rule 1"):
        supplier(tmp_path, '[[rule]]\npython = "making:wrong"').supply(3, receive, [])
    with pytest.raises(TensorRulesError, match="raised ZeroDivisionError"):
        supplier(tmp_path, '[[rule]]\npython = "making:broken"').supply(3, receive, [])
    with pytest.raises(TensorRulesError, match="cannot import making:absent"):
        supplier(tmp_path, '[[rule]]\npython = "making:absent"')


def test_otherwise_error_names_the_operation(tmp_path):
    rules = supplier(tmp_path, 'otherwise = "error"')
    with pytest.raises(
        TensorRulesError,
        match=r"no rule says what all_reduce gives \[.*rank=1 all_reduce group=.0-3. seq=0",
    ):
        rules.supply(1, op("all_reduce", WORLD, 1, inputs=[spec(1)], outputs=[spec(1)]), [])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "[[rule]]\nkind = 'allreduce'\nproduce='own'",
            r"'allreduce' is none of .* \[F, rule 1, kind \(line 2\)\]",
        ),
        (
            "[[rule]]\nproduce='own'\n[[rule]]\nkind='send'\nproduce='own'",
            r"write 'recv'.*rule 2, kind \(line 4\)",
        ),
        ("[[rule]]\nkind='recv'", r"needs exactly one of .* it has none \[F, rule 1 \(line 1\)\]"),
        ("[[rule]]\nconstant=1\nproduce='own'", r"it has produce and constant"),
        ("[[rule]]\ncolour='red'\nproduce='own'", r"\[F, rule 1, colour \(line 2\)\]"),
        ("[[rule]]\nuniform=[0,'vocabulary']", r"\[parameters\] has no 'vocabulary'"),
        ("[[rule]]\nuniform=[5, 5]", r"rule 1: uniform needs a first number below"),
        ("[[rule]]\ndtype='int63'\nproduce='own'", r"rule 1, dtype \(line 2\)"),
        ("otherwise = 'maybe'", r"\[F, otherwise\]"),
        ("[[rule]\n", "not TOML"),
    ],
)
def test_mistakes_are_told_with_their_place(tmp_path, text, message):
    assert re.search(message, refused(tmp_path, text))


def test_rule_sets_of_the_package():
    assert builtin_names() == [
        "data-status",
        "independent",
        "mirror",
        "moe-splits",
        "moe-splits-zero",
        "tokens",
    ]
    for name in builtin_names():
        RuleSupplier(read_rules(f"builtin:{name}"), str)
    assert read_rules("builtin:tokens?vocabulary=99").parameters == {"vocabulary": 99}
    for name in (
        "builtin:token",
        "builtin:tokens?vocab=9",
        "builtin:tokens?vocabulary=x",
        "no/such.toml",
    ):
        with pytest.raises(TensorRulesError):
            read_rules(name)


@pytest.mark.parametrize(
    "dtype",
    [
        "float64",
        "bfloat16",
        "float8_e4m3fn",
        "int64",
        "uint8",
        "uint16",
        "bool",
        "complex64",
        "complex128",
    ],
)
def test_every_element_type_can_be_made(tmp_path, dtype):
    receive = op(
        "recv",
        WORLD,
        3,
        outputs=[spec(4, 2, dtype=dtype), spec(0, dtype=dtype), spec(dtype=dtype)],
        peer=1,
    )
    for text in ("produce = 'zeros'", "constant = 1", "uniform = [0, 2]"):
        made = supplier(tmp_path, f"[[rule]]\n{text}").supply(3, receive, [])
        assert [(tuple(t.shape), str(t.dtype)) for t in made] == [
            (s, f"torch.{dtype}") for s in ((4, 2), (0,), ())
        ]


def test_all_members_or_none(tmp_path):
    rules = AllOrNone(FirstOf([supplier(tmp_path, "[[rule]]\nrank = 1\nproduce = 'own'")]))
    ops = [op("all_reduce", WORLD, rank, inputs=[spec(1)], outputs=[spec(1)]) for rank in WORLD]
    assert rules.supply(0, ops[0], [torch.ones(1)]) is None
    with pytest.raises(
        TensorRulesError, match="rank 1 is given the result of all_reduce, and rank 0 is not"
    ):
        rules.supply(1, ops[1], [torch.ones(1)])
    agreed = AllOrNone(supplier(tmp_path, "[[rule]]\nproduce = 'own'"))
    for rank in WORLD:
        assert agreed.supply(rank, ops[rank], [torch.ones(1)])
    assert agreed._open == {}


def test_what_a_rule_leaves_to_its_partners_is_performed_whatever_comes_after(tmp_path):
    last = supplier(tmp_path, "[[rule]]\nproduce = 'zeros'")
    (tmp_path / "first.toml").write_text("[[rule]]\nkind = 'barrier'\nproduce = 'real'")
    rules = RuleSupplier(read_rules(tmp_path / "first.toml"), str, after=last)
    assert rules.supply(0, op("barrier", WORLD, 0), []) is None
    assert rules.supply(0, op("all_reduce", WORLD, 0, outputs=[spec(1)]), [])[0].tolist() == [0]


@pytest.mark.parametrize(
    ("call", "odd", "what"),
    [
        ("all_reduce", {"size": 5}, r"number of elements of all_reduce: 5 on rank 1 at b.py:2; 4"),
        ("all_reduce", {"dtype": "float64"}, "element type"),
        ("barrier", {}, "operation"),
        ("all_reduce", {"size": 5, "objects": True}, None),
        ("reduce_scatter", {"size": 5}, None),
    ],
)
def test_members_that_are_answered_one_by_one_make_the_same(tmp_path, call, odd, what):
    rules = AllOrNone(supplier(tmp_path, "[[rule]]\nproduce = 'keep'"))

    def made(rank, call, size=4, dtype="float32", objects=False):
        one = [spec(size, dtype="uint8" if objects else dtype)]
        inputs = [] if call == "barrier" else one * (4 if call == "reduce_scatter" else 1)
        outputs = [] if call == "barrier" else one
        return op(call, WORLD, rank, inputs=inputs, outputs=outputs, site="ab"[rank] + ".py:2")

    objects = odd.get("objects", False)
    first = made(0, "all_reduce" if call == "barrier" else call, objects=objects)
    rules.supply(0, first, [torch.ones(4)] * len(first.inputs))
    second = made(1, call, **odd)
    if what is None:
        rules.supply(1, second, [torch.ones(5)] * len(second.inputs))
        return
    with pytest.raises(MismatchError, match=f"ranks 1 and 0 disagree on the {what}"):
        rules.supply(1, second, [torch.ones(4)] * len(second.inputs))
