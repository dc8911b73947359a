"""What each entry point of torch.distributed becomes: one Op, seen by observer and role.

A world of four ranks of which only rank 1 exists; its role does nothing but remember.
"""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="needs the extra `replay`")

import torch.distributed as dist  # noqa: E402
from torch.distributed.distributed_c10d import _coalescing_manager  # noqa: E402

from prismreplay.errors import UnsupportedOperationError  # noqa: E402
from prismreplay.runtime.installing import install  # noqa: E402
from prismreplay.runtime.operations import Call  # noqa: E402
from prismreplay.runtime.process_group import PrismProcessGroup  # noqa: E402
from prismreplay.runtime.stores import RemoteStore  # noqa: E402

# torch warns of what is deprecated, and of NCCL's absence, about calls that programs make.
pytestmark = pytest.mark.filterwarnings("ignore")

RANK, SIZE = 1, 4


class Keys:
    """A store with the one operation that making groups needs."""

    def call(self, operation, *_arguments):
        raise AssertionError(operation)


class DonePending:
    def __init__(self, source):
        self.source = source
        self.waits = 0

    def wait(self):
        self.waits += 1

    def done(self):
        return False


class Remembering:
    """A role and an observer."""

    wants_real_groups = False
    wants_sites = True

    def __init__(self):
        self.ops, self.events, self.groups, self.calls = [], [], [], []
        self.source = 3

    def join(self, group):
        self.groups.append(group)

    def joined(self, group):
        assert group is self.groups[-1]

    def submit(self, op, inputs, outputs, call):
        assert [tuple(tensor.shape) for tensor in inputs] == [spec.shape for spec in op.inputs]
        assert [tuple(tensor.shape) for tensor in outputs] == [spec.shape for spec in op.outputs]
        self.ops.append(op)
        self.calls.append(call)
        if op.call is Call.ALL_GATHER:  # the other ranks are as this one
            for output in outputs:
                output.copy_(inputs[0])
        return DonePending(self.source)

    def make_store(self, namespace):
        return RemoteStore(Keys(), namespace)

    def issued(self, op):
        self.events.append(("issued", op.call))
        return len(self.events) - 1

    def waiting(self, token):
        self.events.append(("waiting", token))

    def waited(self, token, source=None):
        self.events.append(("waited", token, source))

    def completed(self, *_times):
        raise AssertionError


@pytest.fixture
def world(monkeypatch):
    variables = {
        "RANK": RANK,
        "WORLD_SIZE": SIZE,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": 1,
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))
    role = Remembering()
    installed = install(role, role)
    dist.init_process_group("nccl")
    yield role
    if dist.is_initialized():
        dist.destroy_process_group()
    installed.remove()


def floats(*shape):
    return torch.zeros(shape)


def test_backend_stays_the_one_asked_for(world):
    assert isinstance(dist.group.WORLD, PrismProcessGroup)
    assert dist.get_backend() == "nccl"
    group = dist.new_group([0, 1], backend="gloo", group_desc="pair")
    assert dist.get_backend(group) == "gloo"
    default, pair = world.groups
    assert (default.ranks, default.rank, default.desc) == ((0, 1, 2, 3), 1, "default_pg")
    assert (pair.ranks, pair.rank, pair.desc, pair.backend) == ((0, 1), 1, "pair", "gloo")
    assert dist.new_group([0, 3]) is dist.GroupMember.NON_GROUP_MEMBER


def test_later_worlds_are_of_a_later_generation(world):
    dist.destroy_process_group()
    dist.init_process_group("gloo")
    assert [group.key for group in world.groups] == ["0/0", "1/0"]


PARTS = [floats(2) for _ in range(SIZE)]
COLLECTIVES = {
    Call.ALL_REDUCE: (lambda: dist.all_reduce(floats(3, 2)), 24, 1, 1),
    Call.BROADCAST: (lambda: dist.broadcast(floats(3), 0), 12, 0, 1),
    Call.REDUCE: (lambda: dist.reduce(floats(3), RANK), 12, 1, 1),
    Call.ALL_GATHER: (lambda: dist.all_gather(PARTS, floats(2)), 32, 1, 4),
    Call.ALL_GATHER_SINGLE: (
        lambda: dist.all_gather_into_tensor(floats(8), floats(2)),
        32,
        1,
        1,
    ),
    Call.GATHER: (lambda: dist.gather(floats(2), None, dst=0), 32, 1, 0),
    Call.SCATTER: (lambda: dist.scatter(floats(2), PARTS, src=RANK), 32, 4, 1),
    Call.REDUCE_SCATTER: (lambda: dist.reduce_scatter(floats(2), PARTS), 32, 4, 1),
    Call.REDUCE_SCATTER_SINGLE: (
        lambda: dist.reduce_scatter_tensor(floats(2), floats(8)),
        32,
        1,
        1,
    ),
    Call.ALL_TO_ALL: (lambda: dist.all_to_all(PARTS, PARTS), 32, 4, 4),
    Call.ALL_TO_ALL_SINGLE: (
        lambda: dist.all_to_all_single(floats(6, 2), floats(5, 2), [3, 1, 1, 1], [2, 1, 1, 1]),
        40,
        1,
        1,
    ),
    Call.BARRIER: (dist.barrier, 0, 0, 0),
}


@pytest.mark.parametrize("call", COLLECTIVES)
def test_collectives(world, call):
    start, nbytes, inputs, outputs = COLLECTIVES[call]
    start()
    (op,) = world.ops
    assert (op.call, op.seq, op.payload_bytes) == (call, 0, nbytes)
    assert (len(op.inputs), len(op.outputs)) == (inputs, outputs)
    assert op.dtype == (None if call is Call.BARRIER else "float32")
    assert world.events == [("issued", call), ("waiting", 0), ("waited", 0, None)]
    assert op.site.startswith("test_process_group.py:")


def test_reductions_and_roots_and_splits(world):
    dist.all_reduce(floats(1), dist.ReduceOp.MAX)
    dist.all_reduce(floats(1), dist._make_nccl_premul_sum(0.25))
    pair = dist.new_group([1, 2])
    dist.broadcast(floats(1), 2, group=pair)
    dist.all_to_all_single(floats(4), floats(4))
    dist.all_to_all_single(floats(6, 2), floats(5, 2), [3, 1, 1, 1], [2, 1, 1, 1])
    largest, scaled, sent, even, uneven = world.ops
    assert (largest.reduce_op, largest.premul_factor) == ("max", None)
    assert (scaled.reduce_op, scaled.premul_factor) == ("premul_sum", 0.25)
    assert (sent.root, sent.seq) == (2, 0)
    assert (even.input_splits, even.output_splits) == ((), ())
    assert (uneven.input_splits, uneven.output_splits) == ((2, 1, 1, 1), (3, 1, 1, 1))
    assert [op.seq for op in world.ops if op.group.size == SIZE] == [0, 1, 2, 3]


def test_methods_take_arguments_in_all_of_torchs_forms(world):
    group, tensor = dist.group.WORLD, floats(2)
    group.allreduce(tensor)
    group.allreduce([tensor], dist.ReduceOp.MIN)
    group.allreduce(tensor, op=dist.ReduceOp.MAX)
    group.broadcast(tensor, root=2)
    group.reduce(tensor, 3, dist.ReduceOp.MAX)
    group.gather([], tensor, 0)
    group.scatter(tensor, PARTS, RANK)
    group.reduce_scatter(tensor, PARTS, dist.ReduceOp.MAX)
    group.allgather(PARTS, tensor)
    found = [(op.call.value, op.reduce_op, op.root) for op in world.ops]
    assert found == [
        ("all_reduce", "sum", None),
        ("all_reduce", "min", None),
        ("all_reduce", "max", None),
        ("broadcast", None, 2),
        ("reduce", "max", 3),
        ("gather", None, 0),
        ("scatter", None, 1),
        ("reduce_scatter", "max", None),
        ("all_gather", None, None),
    ]


def test_messages_are_numbered_by_pair_and_tag(world):
    gloo = dist.new_group(backend="gloo")
    for destination, tag in ((2, 0), (2, 0), (0, 0), (2, 1), (2, 1)):
        dist.isend(floats(1), destination, group=gloo, tag=tag)
    dist.irecv(floats(1), 2, group=gloo)
    assert [op.seq for op in world.ops] == [0, 1, 0, 1 << 32, (1 << 32) + 1, 0]
    assert [op.peer for op in world.ops] == [2, 2, 0, 2, 2, 2]


def test_a_message_to_oneself_has_one_number(world):
    dist.group.WORLD.send([floats(1)], RANK, 0)
    dist.group.WORLD.recv([floats(1)], RANK, 0)
    assert [(op.seq, op.peer) for op in world.ops] == [(0, RANK), (0, RANK)]


def test_nccl_knows_no_tags(world):
    dist.isend(floats(1), 2, tag=7)
    dist.isend(floats(1), 2, tag=9)
    assert [(op.seq, op.tag) for op in world.ops] == [(0, 0), (1, 0)]


def test_receive_from_anyone_learns_its_sender(world):
    assert dist.recv(floats(1)) == 3
    (op,) = world.ops
    assert (op.seq, op.peer) == (None, None)
    assert world.events[-1] == ("waited", 0, 3)


def ring(group=None):
    return [
        dist.P2POp(dist.irecv, floats(1), 0, group),
        dist.P2POp(dist.isend, floats(1), 2, group),
    ]


def test_a_batch_is_one_launch(world):
    assert len(dist.batch_isend_irecv(ring())) == 1
    assert len(dist.batch_isend_irecv(ring(dist.new_group(backend="gloo")))) == 2
    batches = [op.batch for op in world.ops]
    assert batches[0] == batches[1] != batches[2] == batches[3]
    dist.barrier()
    assert world.ops[-1].batch is None


def test_waits_within_a_coalescing_block_happen_at_its_end(world):
    with _coalescing_manager(device=torch.device("cpu")):
        dist.broadcast(floats(1), 0)
        dist.broadcast(floats(1), 2)
        assert [event[0] for event in world.events] == ["issued", "issued"]
    assert [event[0] for event in world.events[2:]] == ["waiting", "waited"] * 2
    assert len({op.batch for op in world.ops}) == 1


def test_coalesced_collectives_are_one_operation(world):
    with _coalescing_manager():
        dist.all_reduce(floats(2))
        dist.all_reduce(floats(3))
    (op,) = world.ops
    assert (op.payload_bytes, len(op.inputs)) == (20, 2)


def test_asking_for_a_future_does_not_wait(world):
    work = dist.all_reduce(floats(1), async_op=True)
    future = work.get_future()
    then = future.then(lambda done: len(done.value()))
    assert not future.done()
    assert [event[0] for event in world.events] == ["issued"]
    assert then.wait() == 1
    assert future.done()
    assert work.is_completed()
    assert [event[0] for event in world.events] == ["issued", "waiting", "waited"]


def test_ddp_waits_at_the_end_of_backward(world):
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(3)))
    ddp = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.0001)
    for _ in range(2):  # the second forward pass makes the buckets anew
        ddp(floats(2, 8)).sum().backward()
    world.events.clear()
    ddp(floats(2, 8)).sum().backward()
    kinds = [event[0] for event in world.events]
    buckets = kinds.count("issued")
    assert buckets > 1
    assert kinds == ["issued"] * buckets + ["waiting", "waited"] * buckets


@pytest.mark.usefixtures("world")
def test_split_group():
    half = dist.group.WORLD.split_group([0, 1], group_name="half", group_desc="tp")
    assert (half.size(), half.rank(), half.group.ranks, half.group.desc) == (2, 1, (0, 1), "tp")
    assert dist.group.WORLD.split_group([0, 2]) is None


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("merge_remote_group", lambda: dist.group.WORLD.merge_remote_group(None, 1)),
        ("_register_backend", lambda: dist.group.WORLD._register_backend(None, None)),
        ("meta", lambda: dist.all_reduce(torch.ones(2, device="meta"))),
        ("sparse_coo", lambda: dist.group.WORLD.allreduce(torch.ones(2).to_sparse())),
    ],
)
def test_what_is_not_covered_is_named(world, name, call):
    with pytest.raises(UnsupportedOperationError, match=name):
        call()
    assert world.ops == []


def test_every_method_of_torchs_class_is_ours():
    ours = PrismProcessGroup.__mro__[: PrismProcessGroup.__mro__.index(dist.ProcessGroup)]
    inherited = {
        name
        for name in dir(dist.ProcessGroup)
        if not name.startswith("__")
        and not any(name in vars(each) for each in ours)
        and callable(getattr(dist.ProcessGroup, name))
        and not isinstance(getattr(dist.ProcessGroup, name), type)
    }
    assert inherited <= {"boxed", "unbox", "_pybind11_conduit_v1_"}


@pytest.mark.usefixtures("world")
def test_program_tensors_are_no_copies():
    assert dist.all_reduce(tensor := floats(2), async_op=True).result()[0] is tensor


def test_a_group_that_exists_cannot_be_replaced(world):
    with pytest.raises(UnsupportedOperationError, match="exists already"):
        install(world, world)


def test_removed_means_gone(world):
    call = dist.batch_isend_irecv
    dist.destroy_process_group()
    other = install(world, world)
    assert dist.batch_isend_irecv is not call
    other.remove()
    assert dist.batch_isend_irecv is call
