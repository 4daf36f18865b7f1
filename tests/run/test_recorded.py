"""The optimizer step as CUDA graphs. Without a GPU, operations listed with the memory that they had play the graph."""

import contextlib
import dataclasses
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from model import faster
from run import recorded
from run.ranks import Ranks
from run.training import Training
from tests.run.test_training import CONFIG, CPU, batch, differing, state

WAITS = torch.ops.aten._local_scalar_dense.default, torch.ops.aten.lift_fresh.default  # .item(), torch.tensor(number)


def tensors(*values):
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def place(tensor):
    return tensor.untyped_storage().data_ptr()


class Graph(TorchDispatchMode):
    """Operations with the numbers and the memory that they had; while it is recorded, memory keeps what it holds."""

    def __init__(self):
        super().__init__()
        self.calls, self.own, self.before = [], set(), {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        assert function not in WAITS, function
        for argument, given in zip(function._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                for tensor in tensors(given):
                    if place(tensor) not in self.own:
                        storage = tensor.untyped_storage()
                        self.before.setdefault(place(tensor), (storage, storage.clone()))
        results = function(*args, **kwargs)
        made = [result for result in tensors(results) if place(result) not in set(map(place, tensors(args, kwargs)))]
        self.own.update(map(place, made))
        self.calls.append((function, args, kwargs, results))
        return results

    def undo(self):
        for storage, content in self.before.values():
            storage.copy_(content)

    @torch.no_grad()
    def replay(self):
        for function, args, kwargs, results in self.calls:
            inputs = set(map(place, tensors(args, kwargs)))
            for old, new in zip(tensors(results), tensors(function(*args, **kwargs)), strict=True):
                if place(old) not in inputs:
                    old.copy_(new)


@pytest.fixture
def on_paper(monkeypatch):
    """torch.cuda as far as it is needed, on the CPU."""

    @contextlib.contextmanager
    def recording(graph, **how):
        assert how["capture_error_mode"] == "thread_local" and how["pool"] == "the one pool"
        try:
            with graph:
                yield
        finally:
            graph.undo()

    stream = SimpleNamespace(wait_stream=lambda other: None, device_index=0)
    for name, value in {
        "CUDAGraph": Graph, "graph": recording, "Stream": lambda: stream, "current_stream": lambda: stream,
        "stream": lambda stream: contextlib.nullcontext(), "graph_pool_handle": lambda: "the one pool",
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)


def recording(config, device=CPU):
    training = Training(config, device)
    training.recorded = recorded.Recorded(training.take, clean=training.flat.forget)
    return training


def steps(training, number, device=CPU):
    """Figures of the steps of so many batches, each step at another rate and momentum."""
    found = []
    for step in range(4 * number):
        if step % 4 == 0:
            loaded = batch(device, training.config.batch_size)
            crops = tuple(view.roll(step, 2) for view in loaded.views)
            given = list(zip(*training.gather(crops, training.sample(loaded, step)), strict=True))
        figures, finite = training.step(*given[step % 4], 0.3 + 0.05 * step)
        assert finite
        found.append(figures)
    return torch.stack(found)


HALF = {"precision": "bfloat16", "ema": None, "clip": "norm", "depth": 3}


@pytest.mark.parametrize("more", [{"accumulate": 2}, HALF], ids=str)
def test_recorded_steps_are_the_steps(on_paper, more, monkeypatch):
    """Bit for bit: no number of Python's is in them, nothing waits, and all results are copies. In half precision with
    the forms that some GPUs have."""
    monkeypatch.setattr(faster, "pays", lambda device: True)
    config = dataclasses.replace(CONFIG, **more)
    plain, training = Training(config, CPU), recording(config)
    assert torch.equal(steps(training, 3), steps(plain, 3))
    assert not differing(state(training), state(plain))
    assert len(training.recorded.graphs) == 4 and not training.recorded.failed


@pytest.mark.parametrize("version", ["2.12.1+cu130", "2.13.0"])
def test_a_recording_that_fails_is_said_and_changes_nothing(on_paper, monkeypatch, capsys, version):
    """Also where it is the third: no other graph is used any more. An older torch is told that no recording goes on."""
    plain, training, told = Training(CONFIG, CPU), recording(CONFIG), []
    graph = torch.cuda.graph
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion(version))
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", lambda *which: told.append(which))

    def collect():  # all gradients are there by now
        raise RuntimeError("operation not permitted\nwhen stream is capturing")

    @contextlib.contextmanager
    def failing(*args, **how):
        with graph(*args, **how), monkeypatch.context() as patch:
            if len(training.recorded.graphs) == 2:
                patch.setattr(training.flat, "collect", collect)
            yield

    monkeypatch.setattr(torch.cuda, "graph", failing)
    assert torch.equal(steps(training, 2), steps(plain, 2))
    assert not differing(state(training), state(plain))
    line = "steps go on without a CUDA graph, which could not be recorded: operation not permitted\n"
    assert capsys.readouterr().err == line
    assert not training.recorded.graphs and told == [(0, "the one pool")] * (version < "2.13")


def test_steps_are_two_ahead_at_most(monkeypatch):
    """Each waits for the one two before, and for no other."""
    told, training = [], Training(CONFIG, CPU)

    class Event:
        def __init__(self, blocking):
            assert blocking  # a thread that spins would take a core from the decoder
            self.number = sum(kind == "queued" for kind, _ in told)

        def record(self):
            told.append(("queued", self.number))

        def synchronize(self):
            told.append(("waited", self.number))

    monkeypatch.setattr(torch.cuda, "Event", Event)
    training.on_gpu = True
    steps(training, 1)
    assert told == [("queued", 0), ("queued", 1), ("queued", 2), ("waited", 0), ("queued", 3), ("waited", 1)]


def test_no_graph_is_left_when_the_ranks_part(on_paper, monkeypatch):
    """NCCL would wait for its end."""
    training, left = recording(CONFIG), []
    steps(training, 2)
    assert len(training.recorded.graphs) == 4
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "destroy_process_group", lambda: left.append(len(training.recorded.graphs)))
    Ranks.leave()
    assert left == [0]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("precision", "pieces", "relative", "absolute"), [("float32", 2, 1e-3, 1e-4), ("bfloat16", 1, 0.03, 0.02)]
)
def test_losses_with_and_without_graphs(precision, pieces, relative, absolute):
    """Pieces are rounded in other places than a whole, and what batch norms make of that grows with the steps: in
    bfloat16 beyond any tolerance with 4 images; with 16, results rounded at random move losses by up to 1.1 % and
    similarities by up to 0.008."""
    device = torch.device("cuda")
    config, found = dataclasses.replace(CONFIG, precision=precision, lr=1e-5, batch_size=16), []
    for cuda_graph in (False, True):
        accumulate = pieces if cuda_graph else 1
        training = Training(dataclasses.replace(config, cuda_graph=cuda_graph, accumulate=accumulate), device)
        assert (training.recorded is not None) == cuda_graph
        found.append(steps(training, 4, device))
    assert len(training.recorded.graphs) == 4 and not training.recorded.failed
    torch.testing.assert_close(*found, rtol=relative, atol=absolute)
