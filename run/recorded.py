"""A function on a GPU, recorded as CUDA graphs: launched as a whole, its kernels wait for no Python."""

import contextlib
import sys
import weakref
from collections.abc import Callable

import torch
from torch import Tensor

WARM_UP = 4  # calls before the first recording: what compiles, chooses algorithms or fills caches has done so

_ALIVE: "weakref.WeakSet[Recorded]" = weakref.WeakSet()


def release() -> None:
    """Lets go of all graphs. NCCL does not end a group, but waits for ever, while one holds its collectives."""
    for recorded in _ALIVE:
        recorded.graphs.clear()


class Recorded:
    """``function`` of tensors, recorded for each set of tensors that it is called with, by their addresses.

    Its results are tensors too, of which copies are returned, and whatever else differs from call to call has to be in
    memory that stays where it is. A graph's own memory is shared with the others: only one set of activations is held.

    Where recording fails, one line on stderr says so, ``clean`` takes back what was done halfway, and all calls go on
    as they are. The first ``WARM_UP`` calls are not recorded.
    """

    def __init__(self, function: Callable[..., tuple[Tensor, ...]], *, clean: Callable[[], None]):
        self.function, self.clean = function, clean
        self.calls, self.failed = 0, False
        self.graphs: dict[tuple[int, ...], tuple] = {}  # address: graph, results, and arguments, so that they stay
        self.stream, self.pool, self.kind = torch.cuda.Stream(), torch.cuda.graph_pool_handle(), torch.cuda.CUDAGraph
        _ALIVE.add(self)

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        self.calls += 1
        address = tuple(tensor.data_ptr() for tensor in tensors)
        if self.calls > WARM_UP and address not in self.graphs and not self.failed:
            self._record(address, tensors)
        if address not in self.graphs:
            return self._called(tensors)
        graph, results, _ = self.graphs[address]
        graph.replay()
        return tuple(result.clone() for result in results)  # the next graph may write over them

    def _called(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Calls the function on the stream that is to be recorded: libraries then have their memory there already."""
        before = torch.cuda.current_stream()
        self.stream.wait_stream(before)
        with torch.cuda.stream(self.stream):
            results = self.function(*tensors)
        before.wait_stream(self.stream)
        return results

    def _record(self, address: tuple[int, ...], tensors: tuple[Tensor, ...]) -> None:
        graph = self.kind()
        # The decoder's threads allocate meanwhile, which the mode "global" would not let them.
        how = {"pool": self.pool, "stream": self.stream, "capture_error_mode": "thread_local"}
        try:
            # Outside a stream of its own: a recording that fails leaves its stream the current one.
            with torch.cuda.stream(torch.cuda.current_stream()), torch.cuda.graph(graph, **how):
                results = self.function(*tensors)
        except RuntimeError as error:
            self.failed = True
            # With the one that failed torch may free the workspace of cuBLAS on this stream, in which the others write
            # (2.14, pytorch issue 193402). And beside the memory of graphs, that of steps without them may not fit.
            self.graphs.clear()
            if torch.__version__ < "2.13":  # which else believes that it records, and frees no cached memory any more
                with contextlib.suppress(RuntimeError):
                    torch._C._cuda_endAllocateToPool(self.stream.device_index, self.pool)
            self.clean()
            reason = str(error.__context__ or error).strip().splitlines()[0]  # the recording's own end may fail too
            print(f"steps go on without a CUDA graph, which could not be recorded: {reason}", file=sys.stderr)
        else:
            self.graphs[address] = graph, results, tensors
