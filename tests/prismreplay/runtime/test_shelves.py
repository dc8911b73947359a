"""What torch's backend would keep is kept for as long, when a stream of ours has waited first."""

from __future__ import annotations

import weakref

import pytest

from prismreplay.runtime.shelves import LOOK_EVERY_NS, Shelf


class Tensor:
    pass


class Story:
    def __init__(self):
        self.now, self.over, self.captures = 1, set(), False
        self.shelf = Shelf(lambda: not self.captures, lambda: self.now)
        self.kept, self.alive = [], []

    def issue(self):
        """An operation of the group; returns its number."""
        self.shelf.issued()
        tensor, number = Tensor(), len(self.kept)
        self.alive.append(weakref.ref(tensor))
        self.kept.append(self.shelf.keep([tensor], lambda: number in self.over))
        return number

    def lives(self):
        return [each() is not None for each in self.alive]


@pytest.fixture
def story():
    return Story()


def test_a_wait_of_the_program_gives_up_at_once(story):
    story.issue()
    story.issue()
    story.kept[0].release()
    assert story.lives() == [False, True]


def test_a_wait_of_the_program_gives_up_the_backends_handle(story):
    """The handle has the outputs, too: memory is free at once, not at the next operation."""

    class Handle:
        def __init__(self):
            self.outputs = [Tensor()]

        def is_completed(self):
            return False

    handle = Handle()
    output = weakref.ref(handle.outputs[0])
    kept = story.shelf.keep(handle.outputs, handle.is_completed)
    del handle
    kept.release()
    assert output() is None
    assert kept.is_over()


def test_without_one_the_next_operation_gives_up_what_was_found_complete(story):
    story.issue()
    story.over.add(0)
    story.issue()
    assert story.lives() == [True, True], "nobody has looked yet"
    story.now += LOOK_EVERY_NS
    assert story.lives() == [True, True], "only the program's thread gives up"
    story.issue()
    assert story.lives() == [False, True, True]
    assert len(story.shelf) == 2
    story.over.add(1)
    story.issue()
    assert story.lives() == [False, True, True, True], "it looks ten times a second"


def test_what_runs_is_kept(story):
    for _ in range(3):
        story.now += LOOK_EVERY_NS
        story.issue()
    assert all(story.lives())


def test_nothing_is_asked_while_a_graph_is_captured(story):
    story.issue()
    story.over.add(0)
    story.now += LOOK_EVERY_NS
    story.captures = True
    story.issue()
    assert story.lives() == [True, True]
    story.captures = False
    story.issue()
    assert story.lives() == [False, True, True]


def test_a_device_out_of_order_keeps_nothing(story):
    def fails():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    story.shelf.keep([Tensor()], fails)
    story.now += LOOK_EVERY_NS
    story.issue()
    assert len(story.shelf) == 1
