"""What sandbox ranks share."""

from __future__ import annotations

import os

from prismreplay.run.ledger import Arrival, Ledger


def test_words_pass_between_processes():
    ledger = Ledger([2, 5])
    ledger.origin_ns, ledger.store_port = 123, 29_500
    pid = os.fork()
    if pid == 0:
        ledger.arrive(5, "0/1 17", Arrival(1_000, 10))
        os._exit(0 if (ledger.origin_ns, ledger.store_port) == (123, 29_500) else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert ledger.arrivals([2, 5], "0/1 17") == [Arrival(1_000, 10)]
    ledger.arrive(2, "0/1 17", Arrival(900, 0))
    assert ledger.arrivals([2, 5], "0/1 17") == [Arrival(900, 0), Arrival(1_000, 10)]
    assert ledger.arrivals([2, 5], "0/1 18") == []
    ledger.close()
