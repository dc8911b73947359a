"""What torch's backend would keep is kept for as long, when a stream of ours has waited first."""

from __future__ import annotations

import weakref

import pytest

from prismreplay.runtime.shelves import LOOK_EVERY_NS, Shelf, found_by_backend


class Tensor:
    pass


class Story:
    def __init__(self, *, looks):
        self.now, self.over = 1, set()
        self.shelf = Shelf(looks=looks, clock=lambda: self.now)
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
    """A backend's thread says what it has found."""
    return Story(looks=False)


@pytest.fixture
def lonely():
    """There is no backend."""
    return Story(looks=True)


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
    kept = story.shelf.keep(handle.outputs, found_by_backend(handle))
    del handle
    kept.release()
    assert output() is None
    assert kept.is_over()


def test_the_next_operation_gives_up_what_the_backends_thread_has_found(story):
    story.issue()
    story.issue()
    assert story.lives() == [True, True]
    story.over.add(0)
    assert story.lives() == [True, True], "only the program's thread gives up"
    story.shelf.issued()
    assert story.lives() == [False, True], "whatever the operation is, also one that keeps nothing"
    assert len(story.shelf) == 1


def test_the_backend_marks_the_future_of_an_outcome():
    class Outcome:
        complete = False

        def done(self):
            return self.complete

    class Work:
        outcome = Outcome()

        def get_future_result(self):
            return self.outcome

        def is_completed(self):
            return True

    found = found_by_backend(Work())
    assert not found(), "complete, but the thread has not looked yet"
    Outcome.complete = True
    assert found()


def test_without_a_backend_it_looks_as_often(lonely):
    lonely.issue()
    lonely.over.add(0)
    lonely.now += LOOK_EVERY_NS // 2
    lonely.issue()
    assert lonely.lives() == [True, True], "nobody has looked yet"
    lonely.now += LOOK_EVERY_NS // 2
    lonely.issue()
    assert lonely.lives() == [False, True, True]
    lonely.over.add(1)
    lonely.issue()
    assert lonely.lives() == [False, False, True, True]
    lonely.over.add(2)
    lonely.issue()
    assert lonely.lives()[2], "it was not there at the last look, however quickly it was over"


def test_after_a_pause_all_that_was_over_is_given_up(lonely):
    for number in range(3):
        lonely.issue()
        lonely.over.add(number)
        lonely.now += 7
    lonely.now += 2 * LOOK_EVERY_NS
    lonely.issue()
    assert lonely.lives() == [False, False, False, True]


@pytest.mark.parametrize("looks", [False, True])
def test_what_runs_is_kept(looks):
    story = Story(looks=looks)
    for _ in range(3):
        story.now += LOOK_EVERY_NS
        story.issue()
    assert all(story.lives())


def test_a_device_out_of_order_keeps_nothing(story):
    def fails():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    story.shelf.keep([Tensor()], fails)
    story.issue()
    assert len(story.shelf) == 1
