import signal
from types import SimpleNamespace

import torch

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
    ranks = [StopRequest(SimpleNamespace(device=torch.device("cuda"), count=2)) for _ in range(2)]
    for step in range(1, 4 * GPU_EVERY + 1):
        ranks[1].asked = float(step > 7)
        answers = {rank.agreed(step) for rank in ranks}
        assert answers == {step in (2 * GPU_EVERY, 3 * GPU_EVERY, 4 * GPU_EVERY)}, step
    assert len(given) == 2 * 4


def test_a_second_request_ends_at_once_and_the_same_one_handed_on_does_not(monkeypatch):
    """torchrun hands on within a second what a terminal has sent to all already."""
    now, raised = [50.0], []
    monkeypatch.setattr(signals.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(signals.signal, "raise_signal", raised.append)
    before = signal.getsignal(signal.SIGTERM)
    asks_too = StopRequest(SimpleNamespace(device=torch.device("cpu"), count=1))
    with asks_too:
        signal.getsignal(signal.SIGINT)(signal.SIGINT, None)
    assert asks_too.agreed(1) and signal.getsignal(signal.SIGINT) == signal.default_int_handler
    with StopRequest(SimpleNamespace(device=torch.device("cpu"), count=1)) as stop:
        assert not stop.agreed(1)
        for now[0], ended in ((50.0, 0), (50.9, 0), (51.0, 0), (51.1, 1), (52.5, 2)):  # counted from the first
            signal.getsignal(signal.SIGTERM)(signal.SIGTERM, None) if not ended else stop._ask(signal.SIGTERM, None)
            assert stop.agreed(1) and len(raised) == ended, now
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert signal.getsignal(signal.SIGTERM) == before and STOPPED == 75
