from __future__ import annotations

import atexit
import os
import tempfile
from pathlib import Path

from prismreplay.collect.forking import fork


def test_what_is_removed_at_the_parents_end_is_left_alone_at_the_childs():
    def run(channel):
        own = tempfile.TemporaryDirectory()
        atexit._run_exitfuncs()
        channel.send(("left", Path(own.name).exists()))
        return 0

    with tempfile.TemporaryDirectory() as folder:
        child = fork(run, ())
        assert child.channel.receive()[0] == ("left", False)
        os.waitpid(child.pid, 0)
        os.close(child.pidfd)
        child.channel.close()
        assert Path(folder).exists()
