from __future__ import annotations

import pytest
import torch

from prismreplay.collect.coordinator import Coordinator
from prismreplay.collect.executor import Executor
from prismreplay.collect.handover import ParcelWriter, Place
from prismreplay.errors import FoldError
from prismreplay.tensors.folding import KnownGroup, fold
from tests.prismreplay.tensors.operations import op, spec


def mesh(**sizes):
    """Groups of a device mesh, last dimension fastest, as init_device_mesh makes them."""
    names, extents = list(sizes), list(sizes.values())
    world = 1
    for extent in extents:
        world *= extent
    groups = [KnownGroup("0", "default_pg", tuple(range(world)))]
    stride = world
    for name, extent in zip(names, extents, strict=True):
        stride //= extent
        for first in range(world):
            if first // stride % extent == 0:
                ranks = tuple(first + place * stride for place in range(extent))
                groups.append(KnownGroup(str(len(groups)), f"mesh_{name}", ranks))
    return groups


def test_the_first_replica_stands_for_all_and_the_last_is_compared():
    found = fold(mesh(dp=4, tp=2), "dp", 8)
    assert found.representatives == (0, 1)
    assert found.symmetry == {2: 0, 3: 1, 4: 0, 5: 1, 6: 0, 7: 1}
    assert found.running == (0, 1, 6, 7)
    assert found.absent == {2: 0, 3: 1, 4: 0, 5: 1}
    assert fold(mesh(dp=4, tp=2), "dp", 8, check=False).running == (0, 1)
    assert fold(mesh(tp=2, dp=4), "dp", 8).representatives == (0, 4)


def test_groups_of_the_axis_are_found_by_name_too():
    assert fold(mesh(copies=2, tp=2), "mesh_cop*", 4).representatives == (0, 1)
    assert fold(mesh(copies=2, tp=2), "copies", 4).representatives == (0, 1)


def test_plain_data_parallelism_has_no_groups_of_its_own():
    assert fold([KnownGroup("0", "default_pg", (0, 1, 2, 3))], "dp", 4).representatives == (0,)


def test_no_such_axis():
    with pytest.raises(
        FoldError, match=r"no process group .* serves the axis dp \[groups: default_pg, mesh_tp\]"
    ):
        fold(mesh(tp=4), "dp", 4)


def test_replicas_that_are_laid_out_differently():
    groups = [
        KnownGroup("1", "mesh_dp", (0, 4)), KnownGroup("2", "mesh_dp", (1, 5)),
        KnownGroup("3", "mesh_dp", (2, 6)), KnownGroup("4", "mesh_dp", (3, 7)),
        KnownGroup("5", "mesh_tp", (0, 1)), KnownGroup("6", "mesh_tp", (2, 3)),
        KnownGroup("7", "mesh_tp", (4, 6)), KnownGroup("8", "mesh_tp", (5, 7)),
    ]  # fmt: skip
    with pytest.raises(FoldError, match="form none"):
        fold(groups, "dp", 8)


def all_reduce(rank, ranks, seq, size=4):
    return op("all_reduce", ranks, rank, inputs=[spec(size)], outputs=[spec(size)], seq=seq)


def test_replicas_that_do_the_same_pass():
    found = fold(mesh(dp=4, tp=2), "dp", 8)
    for seq in range(3):
        assert found.supply(0, all_reduce(0, (0, 1), seq), []) is None
    for seq in range(3):
        assert found.supply(6, all_reduce(6, (6, 7), seq), []) is None
    found.finish()


def test_replicas_that_differ_are_told():
    found = fold(mesh(dp=4, tp=2), "dp", 8)
    found.supply(0, all_reduce(0, (0, 1), 0), [])
    with pytest.raises(
        FoldError,
        match=r"rank 6 does not do what rank 0 does, .*: all_reduce of float32\[5\] in \[6-7\] \| all_reduce of float32\[4\]",
    ):
        found.supply(6, all_reduce(6, (6, 7), 0, size=5), [])


def test_a_replica_that_stops_earlier_is_told():
    found = fold(mesh(dp=4, tp=2), "dp", 8)
    found.supply(6, all_reduce(6, (6, 7), 0), [])
    with pytest.raises(FoldError, match="rank 6 communicates 1 times more than rank 0"):
        found.finish()


def test_roots_and_sizes_of_all_to_all_may_differ():
    found = fold(mesh(dp=4, ep=2), "dp", 8)
    found.supply(
        0, op("broadcast", (0, 2, 4, 6), 0, inputs=[spec(4)], outputs=[spec(4)], root=0), []
    )
    found.supply(6, op("broadcast", (0, 2, 4, 6), 6, outputs=[spec(4)], root=0), [])
    found.supply(0, op("all_to_all_single", (0, 1), 0, inputs=[spec(4)], outputs=[spec(5)]), [])
    found.supply(6, op("all_to_all_single", (6, 7), 6, inputs=[spec(3)], outputs=[spec(4)]), [])
    found.finish()
    assert found.varying == {"all_to_all": 1}


def test_data_of_absent_replicas_are_refused():
    found = fold(mesh(dp=4, tp=2), "dp", 8, check=False)
    across = op("all_to_all_single", (0, 2, 4, 6), 0, inputs=[spec(4)], outputs=[spec(4)])
    with pytest.raises(
        FoldError, match=r"all_to_all_single carries data between ranks 0 and 2"
    ) as caught:
        found.supply(0, across, [])
    assert "expert parallelism" in caught.value.hint
    with pytest.raises(FoldError, match="recv carries data between ranks 0 and 4"):
        found.supply(0, op("recv", (0, 2, 4, 6), 0, outputs=[spec(4)], peer=4), [])
    with pytest.raises(FoldError, match="broadcast carries data"):
        found.supply(0, op("broadcast", range(8), 0, outputs=[spec(4)], root=5), [])
    inside = op("broadcast", (0, 2, 4, 6), 0, outputs=[spec(4), spec(4)], root=4)
    assert found.supply(0, inside, []) == [None, None]


def test_absent_ranks_contribute_what_their_representative_does():
    def parcel(*values):
        writer = ParcelWriter(Place())
        writer.put_tensor(torch.tensor(values))
        return writer.finish()

    coordinator = Coordinator((0, 1), 2, Executor(Place()), stands_for={2: 0, 3: 1})
    ranks = (0, 1, 2, 3)
    for rank in (0, 1):
        coordinator.begin(rank)
    coordinator.grant()
    for seq, (call, outputs) in enumerate(
        [("all_reduce", [1]), ("all_gather", [1] * 4), ("reduce_scatter", [1])]
    ):
        inputs = [spec(1)] * (4 if call == "reduce_scatter" else 1)
        for rank in (0, 1):
            one = op(call, ranks, rank, inputs=inputs, outputs=[spec(n) for n in outputs], seq=seq)
            if seq == 0:
                coordinator.join(rank, one.group)
            coordinator.submit(rank, seq, one, parcel(*[float(rank + 1)] * len(inputs)))
    coordinator.outbox.clear()
    found = {}
    for rank in (0, 1):
        for seq, count in enumerate((1, 4, 1)):
            coordinator.wait(rank, 10 + seq, seq)
            sent = coordinator.outbox.pop()
            spans = sent.message[4]
            found[rank, seq] = [
                sent.parcel.part(span.offset, (1,), torch.float32).item() for span in spans
            ]
            assert len(found[rank, seq]) == count
    # Each replica contributes 1 and 2.
    assert found[0, 0] == found[1, 0] == [6]
    assert found[0, 1] == found[1, 1] == [1, 2, 1, 2]
    assert found[0, 2] == found[1, 2] == [6]
