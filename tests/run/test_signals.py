import signal
from types import SimpleNamespace

import torch

from run import signals
from run.signals import GPU_EVERY, STOPPED, StopRequest


def test_gpus_agree_to_stop_every_few_steps_only(monkeypatch):
    stop = StopRequest(SimpleNamespace(device=torch.device("cuda"), count=2))
    stop.asked, asked = 1.0, []
    monkeypatch.setattr(signals.torch, "tensor", lambda value, device: torch.zeros(1) + value)
    monkeypatch.setattr(signals.dist, "all_reduce", lambda *_: asked.append(True))
    assert [step for step in range(31) if stop.agreed(step)] == [0, GPU_EVERY, 2 * GPU_EVERY, 3 * GPU_EVERY]
    assert len(asked) == 4


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
