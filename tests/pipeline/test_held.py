"""What is held for the device, by events of the tests' own."""

import random
import weakref

import pytest

from pipeline.held import Held


class Device:
    """Does what is queued when it likes, or when it is waited for."""

    def __init__(self):
        self.queued = self.done = 0

    def record(self):
        self.queued += 1
        return Event(self, self.queued)


class Event:
    def __init__(self, device, number):
        self.device, self.number = device, number

    def query(self):
        return self.device.done >= self.number

    def synchronize(self):
        self.device.done = max(self.device.done, self.number)


class Memory:
    pass


@pytest.mark.parametrize("seed", range(20))
def test_nothing_is_let_go_of_before_it_was_read(seed):
    """And all that was, in order, at the next call; never more than two are kept, and nothing is at the end."""
    draw, device, let_go = random.Random(seed), Device(), []
    with Held(device.record) as held:
        for number in range(1, 30):
            memory = Memory()
            weakref.finalize(memory, lambda number=number: let_go.append((number, device.done)))
            before = device.done
            held.until_read(memory)
            del memory
            waited_for = max(before, number - 2)
            assert device.done == waited_for, "the device is waited for where a third is held, no more"
            assert [which for which, _ in let_go] == list(range(1, waited_for + 1))
            device.done += draw.randrange(min(3, number - device.done + 1))
    assert [which for which, _ in let_go] == list(range(1, 30))
    assert all(done >= number for number, done in let_go)


def test_what_ends_early_waits_too():
    device = Device()
    memory = Memory()
    there = weakref.ref(memory)
    with pytest.raises(KeyError), Held(device.record) as held:
        held.until_read(memory)
        del memory
        raise KeyError
    assert device.done == 1 and there() is None
