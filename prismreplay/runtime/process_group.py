"""The process group that a training program gets in place of torch's own.

A Python subclass of `torch.distributed.ProcessGroup`. Python code calls its methods directly;
C++ code (`DistributedDataParallel`'s reducer, functional collectives) reaches them through
torch's trampoline. Both spellings of what torch 2.13 renamed are here. Every entry point becomes
one `Op` with flat lists of tensors, is told to the observer and handed to the role
(`prismreplay.runtime.call_sequence`). What torch asks about a group is answered by
`prismreplay.runtime.held_group`; methods of torch's class that mean nothing here raise an error
that names them (`prismreplay.runtime.refusals`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from prismreplay.runtime.call_arguments import (
    as_list,
    as_lists,
    chosen,
    if_given,
    installed_name,
    parts_of,
    reduction_of,
    root_of,
)
from prismreplay.runtime.call_sequence import CallSequence
from prismreplay.runtime.futures import FutureQueue
from prismreplay.runtime.held_group import HeldGroup
from prismreplay.runtime.operations import Call, Group
from prismreplay.runtime.payloads import plain
from prismreplay.runtime.real_groups import group_of
from prismreplay.runtime.refusals import refuse_all_others
from prismreplay.runtime.roles import GraphObserver, Role
from prismreplay.runtime.works import Batch, JointWork, PrismWork, RealBatch, RealDone

__all__ = ["PrismProcessGroup"]

Tensor = Any
Tensors = Sequence[Any]

living: weakref.WeakSet[PrismProcessGroup] = weakref.WeakSet()
"""The groups of this process."""


@refuse_all_others
class PrismProcessGroup(HeldGroup):
    """A group of ranks whose communications go to the run's role.

    Args:
        group: its name and members, as this rank holds them.
        role: what becomes of communications.
        observer: is told of them, in program order.
        futures: of this process.
        store: the group's key-value store.
        backends: backend asked for, by device type, such as ``{"cuda": "nccl"}``.
        real: torch's own group of the same ranks, when the role wants real groups.
        options: backend options that the program passed.
    """

    def __init__(
        self,
        group: Group,
        role: Role,
        observer: GraphObserver,
        futures: FutureQueue,
        store: Any,
        backends: dict[str, str],
        *,
        real: Any = None,
        options: Any = None,
    ) -> None:
        super().__init__(group, store, backends, real, options)
        self._role = role
        self._observer = observer
        self._futures = futures
        self._calls = CallSequence(group, role, observer, futures)
        role.join(group)
        observer.joined(group)
        living.add(self)

    # ---- groups ---------------------------------------------------------------------------

    def _get_sequence_number_for_group(self) -> int:
        return self._calls.collectives

    def split_group(
        self,
        new_ranks: Sequence[int],
        timeout: Any = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Any = None,
    ) -> PrismProcessGroup | None:
        """The group of some members, given by their ranks in this one; None for all others.

        All members call it, each with the ranks of the part that it will be in.
        """
        real = None
        if self._role.wants_real_groups and self.real is not None:
            more = {} if device_types is None else {"device_types": device_types}
            real = self.real.split_group(
                list(new_ranks), timeout, opts, group_name, group_desc, **more
            )
        if self.group.rank not in new_ranks:
            return None
        ranks = tuple(self.group.ranks[rank] for rank in new_ranks)
        name = group_name or f"{self.group.name}:split:{','.join(map(str, ranks))}"
        types = None if device_types is None else {torch.device(each).type for each in device_types}
        backends = {
            kind: name for kind, name in self.backends.items() if types is None or kind in types
        }
        group = Group(
            name=name,
            ranks=ranks,
            rank=ranks.index(self.group.global_rank),
            backend=self.group.backend,
            generation=self.group.generation,
            desc=group_desc or f"{self.group.desc}:split",
        )
        return PrismProcessGroup(
            group,
            self._role,
            self._observer,
            self._futures,
            torch.distributed.PrefixStore(f"{name}/", self._store) if real is None else self._store,
            backends,
            real=real if real is not None else group_of(self._role, group, backends),
            options=opts,
        )

    # ---- issuing --------------------------------------------------------------------------

    def _on_real(self, method: str, *arguments: Any, **named: Any) -> Callable[[], Any]:
        """The program's call on the real backend, for roles that perform it there."""
        if self.real is None:
            # Roles look at the options, as whether the program goes on meanwhile.
            return partial(_no_real_group, *arguments, **named)
        perform = partial(getattr(self.real, method), *arguments, **named)
        batch = self._calls.batch
        if batch is None or batch.real is None:
            return perform
        joint = batch.real

        def launch() -> Any:
            perform()
            return joint

        return launch

    def _root_only(self, root: int, tensors: Tensors) -> Tensors:
        return tensors if root == self.group.rank else ()

    # ---- collectives ----------------------------------------------------------------------

    def allreduce(self, tensors: Any, *more: Any, **named: Any) -> PrismWork:
        """Reduce onto all; in place."""
        perform = self._on_real("allreduce", tensors, *more, **named)
        flat = [plain(tensor) for tensor in as_list(tensors)]
        op = reduction_of(chosen(more, named, "opts", "op"))
        return self._calls.issue(Call.ALL_REDUCE, flat, flat, perform, op=op)

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> PrismWork:
        """Reduce several tensors onto all in one operation; in place."""
        perform = self._on_real("allreduce_coalesced", tensors, *if_given(opts))
        flat = [plain(tensor) for tensor in tensors]
        return self._calls.issue(Call.ALL_REDUCE, flat, flat, perform, op=reduction_of(opts))

    def broadcast(self, tensors: Any, *more: Any, **named: Any) -> PrismWork:
        """Copy the root's tensors to all."""
        perform = self._on_real("broadcast", tensors, *more, **named)
        flat = [plain(tensor) for tensor in as_list(tensors)]
        root = root_of(chosen(more, named, "opts", "root"))
        sent = self._root_only(root, flat)
        return self._calls.issue(Call.BROADCAST, sent, flat, perform, root=root)

    def reduce(self, tensors: Any, *more: Any, **named: Any) -> PrismWork:
        """Reduce onto the root; in place there."""
        perform = self._on_real("reduce", tensors, *more, **named)
        flat = [plain(tensor) for tensor in as_list(tensors)]
        given = chosen(more, named, "opts", "root")
        root = root_of(given)
        op = chosen(more[1:], named, "op") if isinstance(given, int) else given
        kept = self._root_only(root, flat)
        return self._calls.issue(Call.REDUCE, flat, kept, perform, root=root, op=reduction_of(op))

    def allgather(self, outputs: Any, inputs: Any, *more: Any, **named: Any) -> PrismWork:
        """Every member's tensor to all, into lists."""
        perform = self._on_real("allgather", outputs, inputs, *more, **named)
        got = [plain(tensor) for some in as_lists(outputs, inputs) for tensor in some]
        sent = [plain(tensor) for tensor in as_list(inputs)]
        return self._calls.issue(Call.ALL_GATHER, sent, got, perform)

    def allgather_coalesced(
        self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None
    ) -> PrismWork:
        """Several all-gathers in one; outputs are lists by member, then by input."""
        perform = self._on_real("allgather_coalesced", outputs, inputs, *if_given(opts))
        flat = [plain(some[index]) for index in range(len(inputs)) for some in outputs]
        sent = [plain(tensor) for tensor in inputs]
        return self._calls.issue(Call.ALL_GATHER, sent, flat, perform)

    def _allgather_base(self, output: Tensor, input: Tensor, opts: Any = None) -> PrismWork:
        """Every member's tensor to all, into one tensor."""
        perform = self._on_real(installed_name("all_gather_single"), output, input, *if_given(opts))
        return self._calls.issue(Call.ALL_GATHER_SINGLE, [plain(input)], [plain(output)], perform)

    all_gather_single = _allgather_base

    def allgather_into_tensor_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> PrismWork:
        """Several all-gathers into one tensor each, in one operation."""
        method = installed_name("all_gather_single_coalesced")
        perform = self._on_real(method, outputs, inputs, *if_given(opts))
        sent, got = [plain(tensor) for tensor in inputs], [plain(tensor) for tensor in outputs]
        return self._calls.issue(Call.ALL_GATHER_SINGLE, sent, got, perform)

    all_gather_single_coalesced = allgather_into_tensor_coalesced

    def gather(self, outputs: Any, inputs: Any, *more: Any, **named: Any) -> PrismWork:
        """Every member's tensor to the root."""
        perform = self._on_real("gather", outputs, inputs, *more, **named)
        root = root_of(chosen(more, named, "opts", "root"))
        lists = as_lists(outputs, inputs)
        got = self._root_only(root, [plain(tensor) for some in lists for tensor in some])
        sent = [plain(tensor) for tensor in as_list(inputs)]
        return self._calls.issue(Call.GATHER, sent, got, perform, root=root)

    def gather_single(self, output: Tensor, input: Tensor, opts: Any) -> PrismWork:
        """Every member's tensor to the root, into one tensor (torch >= 2.14)."""
        perform = self._on_real("gather_single", output, input, opts)
        root = root_of(opts)
        got = self._root_only(
            root, parts_of(plain(output), self.group.size) if output is not None else ()
        )
        return self._calls.issue(Call.GATHER, [plain(input)], got, perform, root=root)

    def scatter(self, outputs: Any, inputs: Any, *more: Any, **named: Any) -> PrismWork:
        """One tensor from the root to each member."""
        perform = self._on_real("scatter", outputs, inputs, *more, **named)
        root = root_of(chosen(more, named, "opts", "root"))
        lists = as_lists(inputs, outputs)
        sent = self._root_only(root, [plain(tensor) for some in lists for tensor in some])
        got = [plain(tensor) for tensor in as_list(outputs)]
        return self._calls.issue(Call.SCATTER, sent, got, perform, root=root)

    def reduce_scatter(self, outputs: Any, inputs: Any, *more: Any, **named: Any) -> PrismWork:
        """Reduce lists of tensors; each member keeps one."""
        perform = self._on_real("reduce_scatter", outputs, inputs, *more, **named)
        sent = [plain(tensor) for some in as_lists(inputs, outputs) for tensor in some]
        got = [plain(tensor) for tensor in as_list(outputs)]
        op = reduction_of(chosen(more, named, "opts", "op"))
        return self._calls.issue(Call.REDUCE_SCATTER, sent, got, perform, op=op)

    def _reduce_scatter_base(self, output: Tensor, input: Tensor, opts: Any = None) -> PrismWork:
        """Reduce a tensor; each member keeps its part."""
        perform = self._on_real(
            installed_name("reduce_scatter_single"), output, input, *if_given(opts)
        )
        sent, got = [plain(input)], [plain(output)]
        return self._calls.issue(
            Call.REDUCE_SCATTER_SINGLE, sent, got, perform, op=reduction_of(opts)
        )

    reduce_scatter_single = _reduce_scatter_base

    def reduce_scatter_tensor_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> PrismWork:
        """Several reduce-scatters in one operation."""
        method = installed_name("reduce_scatter_single_coalesced")
        perform = self._on_real(method, outputs, inputs, *if_given(opts))
        sent, got = [plain(tensor) for tensor in inputs], [plain(tensor) for tensor in outputs]
        return self._calls.issue(
            Call.REDUCE_SCATTER_SINGLE, sent, got, perform, op=reduction_of(opts)
        )

    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced

    def alltoall_base(
        self,
        output: Tensor,
        input: Tensor,
        output_splits: Sequence[int] | None = None,
        input_splits: Sequence[int] | None = None,
        opts: Any = None,
    ) -> PrismWork:
        """Rows to every member and from every member; even unless splits are given."""
        output_splits, input_splits = list(output_splits or ()), list(input_splits or ())
        perform = self._on_real(
            installed_name("all_to_all_single"),
            output,
            input,
            output_splits,
            input_splits,
            *if_given(opts),
        )
        splits = (output_splits, input_splits)
        return self._calls.issue(
            Call.ALL_TO_ALL_SINGLE, [plain(input)], [plain(output)], perform, splits=splits
        )

    all_to_all_single = alltoall_base

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> PrismWork:
        """One tensor to every member and one from every member."""
        perform = self._on_real("alltoall", outputs, inputs, *if_given(opts))
        sent, got = [plain(tensor) for tensor in inputs], [plain(tensor) for tensor in outputs]
        return self._calls.issue(Call.ALL_TO_ALL, sent, got, perform)

    def barrier(self, *more: Any, **named: Any) -> PrismWork:
        """Nobody goes on before all are here."""
        return self._calls.issue(Call.BARRIER, (), (), self._on_real("barrier", *more, **named))

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """A barrier that names who is missing; in a run of ours that is the run's task."""
        perform: Callable[[], Any] = _no_real_group
        if self.real is not None:
            checked = partial(self.real.monitored_barrier, timeout, wait_all_ranks)

            def perform() -> Any:
                checked()
                return RealDone()

        self._calls.issue(Call.BARRIER, (), (), perform).wait()

    # ---- point to point -------------------------------------------------------------------

    def send(self, tensors: Tensors, dst: int, tag: int = 0) -> PrismWork:
        """Send one tensor to a member."""
        return self._message(Call.SEND, tensors, dst, tag, self._on_real("send", tensors, dst, tag))

    def recv(self, tensors: Tensors, src: int, tag: int = 0) -> PrismWork:
        """Receive one tensor from a member."""
        return self._message(Call.RECV, tensors, src, tag, self._on_real("recv", tensors, src, tag))

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> PrismWork:
        """Receive one tensor from whoever sends one."""
        perform = self._on_real("recv_anysource", tensors, tag)
        return self._message(Call.RECV, tensors, None, tag, perform)

    def _message(
        self, call: Call, tensors: Tensors, peer: int | None, tag: int, perform: Callable[[], Any]
    ) -> PrismWork:
        flat = [plain(tensor) for tensor in tensors]
        # NCCL has no tags: messages of a pair match in order, whatever their tags.
        if self.backend_for(flat[0].device.type) == "nccl":
            tag = 0
        sent, got = (flat, ()) if call is Call.SEND else ((), flat)
        return self._calls.issue(call, sent, got, perform, peer=peer, tag=tag)

    # ---- batches --------------------------------------------------------------------------

    @contextmanager
    def batched(self, device: Any) -> Iterator[Batch]:
        """Operations issued inside are one launch."""
        coalesces = self.real is not None and self._get_backend(device).supports_coalescing
        with self._calls.batched(RealBatch() if coalesces else None) as batch:
            if batch.real is not None:
                self.real._start_coalescing(device)  # noqa: SLF001
            yield batch
            if batch.real is not None:
                batch.real.launched(self.real._end_coalescing(device))  # noqa: SLF001

    def joined(self, batch: Batch) -> JointWork:
        """One handle for all operations of a batch."""
        return JointWork(batch.works, self._futures)

    def _start_coalescing(self, device: Any) -> None:
        self._open_batch = self.batched(device)
        self._open_batch.__enter__()

    def _end_coalescing(self, device: Any) -> JointWork:  # noqa: ARG002
        batch = self._calls.batch
        if batch is None:
            message = "no coalesced launch is open"
            raise RuntimeError(message)
        self._open_batch.__exit__(None, None, None)
        return self.joined(batch)


def _no_real_group(*_arguments: Any, **_named: Any) -> Any:
    message = "the group was shut down, or this role did not ask for real groups"
    raise RuntimeError(message)
