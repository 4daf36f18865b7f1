import multiprocessing
import signal
import time
from types import SimpleNamespace

import pytest
import torch

from pipeline import waiting
from run import signals
from run.signals import GPU_EVERY, STOPPED, StopRequest


def test_gpus_agree_without_waiting_for_what_is_queued(monkeypatch):
    """Of two ranks one is asked to stop after step 7: both say so after step 20, by what they agreed after step 10."""
    queued, given = [], []

    class Event:
        def record(self):
            self.behind = len(queued)

        def synchronize(self):
            assert self.behind < len(queued), "waits for what was queued just now"
            for number in range(self.behind):
                queued[number]()

    def all_reduce(part, _):
        number = len(given)
        given.append(part.item())
        queued.append(lambda: part.fill_(max(given[number // 2 * 2 :][:2])))

    monkeypatch.setattr(signals.torch, "full", lambda shape, value, device: torch.zeros(shape) + value)
    monkeypatch.setattr(signals.torch.cuda, "Event", Event)
    monkeypatch.setattr(signals.dist, "all_reduce", all_reduce)
    ranks = [StopRequest(SimpleNamespace(device=torch.device("cuda"), count=2), print) for _ in range(2)]
    for step in range(1, 4 * GPU_EVERY + 1):
        ranks[1].asked = float(step > 7)
        answers = {rank.agreed(step) for rank in ranks}
        assert answers == {step in (2 * GPU_EVERY, 3 * GPU_EVERY, 4 * GPU_EVERY)}, step
    assert len(given) == 2 * 4


def test_a_request_is_heard_and_said_and_handlers_are_put_back():
    """Nothing but the thread tells of it; what a handler was before it is again."""
    numbers, said = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP), []
    before = [signal.getsignal(number) for number in numbers]  # in the background of a shell, SIGINT is ignored
    for number in numbers:
        with StopRequest(SimpleNamespace(device=torch.device("cpu"), count=1), said.append) as stop:
            assert not stop.agreed(1) and not waiting.asked_to_stop()
            signal.raise_signal(number)
            with pytest.raises(waiting.Stopped):
                waiting.pause(60)
            assert stop.agreed(1) and waiting.asked_to_stop()
            signal.raise_signal(number)  # torchrun hands on at once what a terminal has sent to all already
    assert len(said) == 3 and said[0].startswith("asked to stop: this step")
    assert [signal.getsignal(number) for number in numbers] == before and signal.set_wakeup_fd(-1) == -1
    assert not waiting.asked_to_stop() and STOPPED == 75


def test_it_ends_beside_a_process_that_was_forked_meanwhile():
    """As those that read images for a detector: an error of one of them was waited out for as long as another lived."""
    child, began = multiprocessing.get_context("fork").Process(target=time.sleep, args=(20,)), time.monotonic()
    with StopRequest(SimpleNamespace(device=torch.device("cpu"), count=1), print):
        child.start()
    child.kill()
    assert time.monotonic() - began < 20
