"""Putting our process group in the place of torch's, in a process that runs a program.

Whatever backend the program names, `init_process_group`, `new_group` and meshes give it a
`PrismProcessGroup`; `get_backend()` still answers what was asked for. The seam is the one
function of torch through which every group is made. For roles that want real groups, torch makes
its own group first, with everything the program said about it, and ours takes its place in
torch's tables. For others no backend and no server is ever started, also not for stores.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from prismreplay.errors import UnsupportedOperationError
from prismreplay.runtime import futures, real_groups, stores
from prismreplay.runtime.operations import Group
from prismreplay.runtime.process_group import PrismProcessGroup
from prismreplay.runtime.roles import GraphObserver, Role

__all__ = ["Installation", "install"]

BACKEND = "prismreplay"
_NON_MEMBER = dist.GroupMember.NON_GROUP_MEMBER


def install(role: Role, observer: GraphObserver) -> Installation:
    """From now on, groups that this process makes hand their communications to `role`.

    Call it before the program makes its first group. The result can undo it.

    Raises:
        UnsupportedOperationError: a group exists already, or torchcomms replaces c10d.
    """
    if dist.is_initialized():
        raise UnsupportedOperationError(
            "the process group exists already",
            hint="start the program through prismreplay, or import prismreplay's part first",
        )
    uses_torchcomms = getattr(c10d, "_use_torchcomms_enabled", None)
    if uses_torchcomms is not None and uses_torchcomms():
        raise UnsupportedOperationError(
            "torchcomms in place of torch.distributed's process groups",
            hint="unset TORCH_DISTRIBUTED_USE_TORCHCOMMS",
        )
    return Installation(role, observer)


class Installation:
    """What was replaced in torch, and the state that the replacements share."""

    def __init__(self, role: Role, observer: GraphObserver) -> None:
        self.role = role
        self.observer = observer
        together = getattr(observer, "waits_together", contextlib.nullcontext)
        self.futures = futures.FutureQueue(together)
        self.generation = -1
        self._undo: list[Callable[[], None]] = []
        self._making: dict[str, Any] = {}
        self._make_group = c10d._new_process_group_helper  # noqa: SLF001
        self._signature = inspect.signature(self._make_group)
        self._replace(c10d, "_new_process_group_helper", self._new_process_group)
        self._replace_everywhere(dist.batch_isend_irecv, self._batch_isend_irecv())
        self._replace_futures()
        self._replace_reducer()
        _keep_compiler_out()
        if not role.wants_real_groups:
            self._register_backend()
            self._replace_stores()
            self._let_errors_through()

    def remove(self) -> None:
        """Put everything back."""
        while self._undo:
            self._undo.pop()()

    def _replace(self, owner: Any, name: str, value: Any) -> None:
        self._undo.append(functools.partial(setattr, owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    def _replace_everywhere(self, old: Any, new: Any) -> None:
        """In every module of torch.distributed that has imported `old` under its name."""
        name = old.__name__
        for module in list(sys.modules.values()):
            ours = getattr(module, "__name__", "").startswith("torch.distributed")
            if ours and vars(module).get(name) is old:
                self._replace(module, name, new)

    # ---- groups ---------------------------------------------------------------------------

    def _new_process_group(self, *arguments: Any, **keywords: Any) -> Any:
        """Stands for torch's function of the same arguments."""
        asked = self._signature.bind(*arguments, **keywords)
        asked.apply_defaults()
        given = asked.arguments
        if str(given["backend"]).lower() in ("fake", "mpi"):
            return self._make_group(*arguments, **keywords)
        if not given["global_ranks_in_group"]:
            self.generation += 1
        if self.role.wants_real_groups:
            pg, store = self._make_group(*arguments, **keywords)
            if pg is not _NON_MEMBER and not isinstance(pg, PrismProcessGroup):
                pg = self._wrap(pg, store, given)
            return pg, store
        self._making = given
        try:
            return self._make_group(*arguments, **keywords)
        finally:
            self._making = {}

    def _wrap(self, real: Any, store: Any, given: dict[str, Any]) -> PrismProcessGroup:
        """Ours around torch's, in torch's tables."""
        ours = PrismProcessGroup(
            self._group(given),
            self.role,
            self.observer,
            self.futures,
            store,
            self._backends(given["backend"]),
            real=real,
        )
        real_groups.take_place(ours, real)
        return ours

    def _group(self, given: dict[str, Any]) -> Group:
        ranks = tuple(given["global_ranks_in_group"] or range(given["group_size"]))
        names = list(dict.fromkeys(self._backends(given["backend"]).values()))
        asked = str(given["backend"])
        return Group(
            name=str(given["group_name"]),
            ranks=ranks,
            rank=given["group_rank"],
            backend=names[0] if asked == "undefined" and len(names) == 1 else asked,
            generation=self.generation,
            desc="" if given["group_desc"] in (None, "undefined") else given["group_desc"],
        )

    @staticmethod
    def _backends(asked: str) -> dict[str, str]:
        """Backend by device type, as torch reads what the program asked for."""
        try:
            chosen = dict(_BACKEND_CONFIG(c10d.Backend(str(asked))).get_device_backend_map())
        except (KeyError, RuntimeError, ValueError):
            chosen = {"cpu": str(asked)}
        if not torch.cuda.is_available():
            # The program was written for GPUs, this machine has none: its tensors are here.
            chosen = {"cpu": chosen.get("cpu") or next(iter(chosen.values()))}
        return {device: str(name) for device, name in chosen.items()}

    def _create(self, options: Any, backend_options: Any) -> PrismProcessGroup:
        """What torch calls to make a group of the backend we registered."""
        given = self._making
        group, backends = self._group(given), self._backends(given["backend"])
        return PrismProcessGroup(
            group,
            self.role,
            self.observer,
            self.futures,
            options.store,
            backends,
            real=real_groups.group_of(self.role, group, backends),
            options=backend_options,
        )

    def _register_backend(self) -> None:
        """Have torch make every group through `_create`, whatever it is called."""
        c10d.Backend.register_backend(
            BACKEND, self._create, extended_api=True, devices=["cpu", "cuda"]
        )
        installation = self

        class Config(_BACKEND_CONFIG):  # type: ignore[misc, valid-type]
            """Says what the program asked for, and gives what we registered."""

            def __init__(self, backend: Any) -> None:
                try:
                    super().__init__(backend)
                except (KeyError, RuntimeError, ValueError):
                    self.device_backend_map = {"cpu": backend}

            def get_device_backend_map(self) -> dict[str, str]:
                given = self.device_backend_map
                if installation._making:
                    return dict.fromkeys(given, c10d.Backend(BACKEND))
                return given

        self._replace(c10d, "BackendConfig", Config)

    def _let_errors_through(self) -> None:
        """Errors in groups called nccl are logged with NCCL's version, which may not exist."""
        logger = importlib.import_module("torch.distributed.c10d_logger")
        describe = logger._get_msg_dict  # noqa: SLF001

        def _get_msg_dict(func_name: str, *arguments: Any, **keywords: Any) -> dict[str, Any]:
            try:
                return dict(describe(func_name, *arguments, **keywords))
            except AttributeError:
                return {"func_name": func_name}

        self._replace(logger, "_get_msg_dict", _get_msg_dict)

    # ---- stores, batches, futures ------------------------------------------------------------

    def _replace_stores(self) -> None:
        make_store = self.role.make_store
        rendezvous = importlib.import_module("torch.distributed.rendezvous")

        def meet(*_arguments: Any, **_keywords: Any) -> Any:
            # Groups of a later `init_process_group` have the names of the first ones.
            return make_store(f"rendezvous:{self.generation + 1}")

        for name in ("TCPStore", "FileStore"):
            if hasattr(rendezvous, name):
                self._replace(rendezvous, name, meet)
        self._replace_everywhere(dist.PrefixStore, stores.PrefixStore)
        self._replace_everywhere(dist.TCPStore, stores.keyed_by(make_store, "tcp", dist.TCPStore))
        self._replace_everywhere(
            dist.FileStore, stores.keyed_by(make_store, "file", dist.FileStore)
        )

    def _batch_isend_irecv(self) -> Callable[[Any], list[Any]]:
        one_by_one = dist.batch_isend_irecv

        @functools.wraps(one_by_one)
        def batch_isend_irecv(p2p_op_list: Any) -> list[Any]:
            group = (p2p_op_list[0].group or dist.group.WORLD) if p2p_op_list else None
            if not isinstance(group, PrismProcessGroup):
                return list(one_by_one(p2p_op_list))
            device = p2p_op_list[0].tensor.device
            with group.batched(device) as batch:
                works = one_by_one(p2p_op_list)
            # NCCL launches a batch as one and gives one handle for it.
            if group.backend_for(device.type) == "nccl":
                return [group.joined(batch)]
            return list(works)

        return batch_isend_irecv

    def _replace_futures(self) -> None:
        collect_all, wait_all = torch.futures.collect_all, torch.futures.wait_all

        @functools.wraps(collect_all)
        def collect(waited: Any) -> Any:
            return futures.gather_futures(waited) or collect_all(waited)

        @functools.wraps(wait_all)
        def wait(waited: Any) -> Any:
            if any(isinstance(future, futures.PendingFuture) for future in waited):
                return [future.wait() for future in waited]
            return wait_all(waited)

        self._replace(torch.futures, "collect_all", collect)
        self._replace(torch.futures, "wait_all", wait)

    def _replace_reducer(self) -> None:
        """Two methods of DDP's reducer, used for uneven inputs, where C++ would wait for us.

        It would wait for futures that only Python completes, and keep the C++ half of a handle
        whose Python half nobody holds.
        """
        reducer = torch._C._distributed_c10d.Reducer  # noqa: SLF001
        run_hook, set_handle = reducer._run_comm_hook, reducer._set_forward_pass_work_handle  # noqa: SLF001
        kept: dict[int, Any] = {}

        def _run_comm_hook(instance: Any, bucket: Any) -> Any:
            return self.futures.collect(lambda: run_hook(instance, bucket))

        def _set_forward_pass_work_handle(
            instance: Any, work: Any, *arguments: Any, **keywords: Any
        ) -> None:
            kept[id(instance)] = work
            set_handle(instance, work, *arguments, **keywords)

        self._replace(reducer, "_run_comm_hook", _run_comm_hook)
        self._replace(reducer, "_set_forward_pass_work_handle", _set_forward_pass_work_handle)


_BACKEND_CONFIG = c10d.BackendConfig


def _keep_compiler_out() -> None:
    """Have torch.compile treat our Python as the C++ that it stands for: call it, not trace it.

    Imports the compiler's front end; torch's optimizers would do so at their first step.
    """
    trace_rules = importlib.import_module("torch._dynamo.trace_rules")
    for package in ("prismreplay", "prismtrace"):
        trace_rules.add(package)
