"""Sandbox ranks on several hosts: who is there, how they find each other, which ranks they run.

The same command runs on every host, started by torchrun or by Slurm. On the first one it is the
hub; on the others it starts its part of the sandbox ranks and passes on what they say
(`prismreplay.run.relaying`).

What goes over the network is pickled, as between ranks of torch.distributed itself: use it on
networks where torch.distributed may be used. Connections begin with a word that both sides know, so
that runs do not mix.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prismreplay.collect.messages import Channel
from prismreplay.errors import HostsError

__all__ = ["Hosts", "Meeting", "Met", "call_hub", "hosts_from", "meet", "ranks_of_host"]

WAIT_SECONDS = 300.0
"""How long hosts wait for each other: torch is imported, and jobs start unevenly."""

_STORE_KEY = "prismreplay/hub"
_DIGEST = 32


@dataclass(frozen=True)
class Hosts:
    """The processes that a launcher has started, one per host.

    Attributes:
        number: of this one; 0 is the hub.
        count: how many.
        address, port: where the hub listens or, with `agent_store`, where torchrun's store does.
        agent_store: hosts meet in torchrun's store.
        run: names the run.
    """

    number: int
    count: int
    address: str
    port: int
    agent_store: bool
    run: str


def hosts_from(environment: Mapping[str, str]) -> Hosts:
    """What the launcher says: torchrun's variables, which examples of Slurm set as well.

    Raises:
        HostsError: a variable is missing or wrong.
    """
    try:
        number, count = int(environment["RANK"]), int(environment["WORLD_SIZE"])
        address, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
    except (KeyError, ValueError) as error:
        raise HostsError(
            f"--hosts needs RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT of a launcher: {error}",
            hint="torchrun --nnodes 2 --nproc-per-node 1 --no-python ... prismreplay run --hosts",
        ) from error
    if not 0 <= number < count:
        raise HostsError(
            f"host {number} of {count}: they are numbered from 0",
            hint="let a launcher set RANK and WORLD_SIZE, or set RANK below WORLD_SIZE",
        )
    return Hosts(
        number,
        count,
        address,
        port,
        agent_store=environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        run=environment.get("TORCHELASTIC_RUN_ID") or environment.get("SLURM_JOB_ID") or "run",
    )


def ranks_of_host(sandbox: Sequence[int], number: int, count: int) -> tuple[int, ...]:
    """Neighbouring sandbox ranks: as even as can be, more on the first hosts.

    Raises:
        HostsError: there are fewer ranks than hosts.
    """
    if len(sandbox) < count:
        raise HostsError(
            f"{len(sandbox)} sandbox ranks for {count} hosts",
            hint="name more sandbox ranks, or use fewer hosts",
        )
    each, more = divmod(len(sandbox), count)
    begin = number * each + min(number, more)
    return tuple(sandbox[begin : begin + each + (number < more)])


@dataclass(frozen=True)
class Met:
    """What a host has found.

    `channels` go to the sandbox ranks of other hosts on the first host, on others from each of
    their own sandbox ranks to the hub.
    """

    number: int
    channels: dict[int, Channel]

    @property
    def other_host(self) -> bool:
        """Whether the hub is elsewhere."""
        return self.number > 0


def meet(hosts: Hosts, sandbox: Sequence[int]) -> Met:
    """Connect this host with the others; `sandbox` are the ranks of all hosts.

    Raises:
        HostsError: they do not find each other.
    """
    here = ranks_of_host(sandbox, hosts.number, hosts.count)
    if hosts.number:
        return Met(hosts.number, call_hub(hosts, here))
    meeting = Meeting(hosts)
    try:
        return Met(0, meeting.await_ranks([rank for rank in sandbox if rank not in here]))
    finally:
        meeting.close()


class Meeting:
    """The hub's side: other hosts call here, once for each of their sandbox ranks.

    Raises:
        HostsError: the port is taken.
    """

    def __init__(self, hosts: Hosts) -> None:
        self._word = secrets.token_bytes(_DIGEST) if hosts.agent_store else _word_of(hosts.run)
        try:
            port = 0 if hosts.agent_store else hosts.port
            self._socket = socket.create_server(("", port), backlog=4096)
        except OSError as error:
            raise HostsError(
                f"cannot listen on port {hosts.port}: {error.strerror}",
                hint="set MASTER_PORT to a free port",
            ) from error
        self._store: Any = None
        if hosts.agent_store:
            self._store = _agent_store(hosts)
            where = f"{self._socket.getsockname()[1]} {self._word.hex()}"
            self._store.set(_STORE_KEY, where)

    def await_ranks(
        self, ranks: Sequence[int], seconds: float = WAIT_SECONDS
    ) -> dict[int, Channel]:
        """Connections to these sandbox ranks of other hosts.

        Raises:
            HostsError: some did not call in time.
        """
        found: dict[int, Channel] = {}
        deadline = time.monotonic() + seconds
        while len(found) < len(ranks):
            self._socket.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                taken, _ = self._socket.accept()
                rank = _greeted(taken, self._word)
            except TimeoutError as error:
                missing = sorted(set(ranks) - set(found))
                raise HostsError(
                    f"no host has called for sandbox ranks {missing[:8]} within {seconds:.0f} s",
                    hint="run the same command on all hosts; can they reach this one?",
                ) from error
            if rank is not None and rank in ranks and rank not in found:
                found[rank] = _channel(taken)
            else:  # somebody else's
                taken.close()
        return found

    def close(self) -> None:
        """Listen no more."""
        self._socket.close()


def call_hub(
    hosts: Hosts, ranks: Sequence[int], seconds: float = WAIT_SECONDS
) -> dict[int, Channel]:
    """Connections to the hub for sandbox ranks of this host.

    Raises:
        HostsError: nobody answers.
    """
    port, word = hosts.port, _word_of(hosts.run)
    if hosts.agent_store:
        said = bytes(_agent_store(hosts).get(_STORE_KEY)).decode().split()
        port, word = int(said[0]), bytes.fromhex(said[1])
    return {rank: _called(hosts.address, port, word, rank, seconds) for rank in ranks}


def _called(address: str, port: int, word: bytes, rank: int, seconds: float) -> Channel:
    deadline = time.monotonic() + seconds
    while True:
        try:
            made = socket.create_connection((address, port), timeout=10.0)
            break
        except OSError as error:
            if time.monotonic() > deadline:
                raise HostsError(
                    f"the hub does not answer: {error}",
                    where=f"{address}:{port}",
                    hint="is the command running on the first host? is the port open?",
                ) from error
            time.sleep(0.1)
    made.sendall(word + rank.to_bytes(8, "little"))
    return _channel(made)


def _greeted(taken: socket.socket, word: bytes) -> int | None:
    """For which rank the other side calls; None if it is not of this run."""
    taken.settimeout(5.0)
    said = b""
    with contextlib.suppress(OSError):
        while len(said) < _DIGEST + 8 and (more := taken.recv(_DIGEST + 8 - len(said))):
            said += more
    if not hmac.compare_digest(said[:_DIGEST], word) or len(said) < _DIGEST + 8:
        return None
    return int.from_bytes(said[_DIGEST:], "little")


def _channel(made: socket.socket) -> Channel:
    made.settimeout(None)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # A host that is gone is noticed although nothing is said.
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    return Channel(made)


def _word_of(run: str) -> bytes:
    """What both sides know: a secret, if the user has set one, and the run's name."""
    secret = os.environ.get("PRISMREPLAY_HOSTS_KEY", "")
    return hashlib.sha256(f"{secret}/{run}".encode()).digest()


def _agent_store(hosts: Hosts) -> Any:
    from datetime import timedelta

    from torch.distributed import TCPStore

    return TCPStore(
        hosts.address,
        hosts.port,
        is_master=False,
        wait_for_workers=False,
        timeout=timedelta(seconds=WAIT_SECONDS),
    )
