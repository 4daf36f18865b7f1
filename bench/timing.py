"""Times of alternatives, measured side by side: in turns, after a warm-up, with the spread."""

import statistics
import time
from collections.abc import Callable

import torch

from bench.findings import failure

NO_KERNEL = "the profiler saw no kernel: it may not look at the GPU here (see the warning of CUPTI)"
ON_CPU = 2**27, (1024, 2048)  # bytes that are copied, and sides of the products, that give a CPU's ceilings
HEAD_START = 1_000_000  # clock cycles the GPU is kept waiting, so that the launches are queued when it begins: 0.5 ms


def measure(calls: dict[str, Callable], device: torch.device, *, seconds: float, rounds: int = 100) -> dict[str, dict]:
    """{name: {"p20", "p50", "p80" in seconds, "runs"}} of the calls.

    Each round runs every call once, until the ``seconds`` or the ``rounds`` are over; three rounds at least. On a GPU
    the time is that between two events on the stream, and the L2 cache is emptied before each call. A call that waits
    for the device, or launches more than 0.5 ms ahead of it, is measured with that wait.
    """
    once = _on_gpu(device) if device.type == "cuda" else _on_cpu
    for call in calls.values():  # compiles, allocates
        once(call)
    times = {name: [] for name in calls}
    end = time.perf_counter() + seconds
    for number in range(rounds):
        if number >= 3 and time.perf_counter() > end:
            break
        for name, call in calls.items():
            times[name].append(once(call))
    return {name: summary(values) for name, values in times.items()}


def measure_each(calls: dict[str, Callable | str], device: torch.device, *, seconds: float) -> dict[str, dict]:
    """The same, with {"not_run": why} of what is no call but the reason why there is none, and {"failed": why} of one
    that fails at first, which stops no other."""
    found = {}
    for name, call in calls.items():
        found[name] = {} if callable(call) else {"not_run": call}
        if found[name]:
            continue
        try:
            call()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        except Exception as error:
            found[name] = {"failed": failure(error)}
    running = {name: call for name, call in calls.items() if not found[name]}
    return found | (measure(running, device, seconds=seconds) if running else {})


def summary(seconds: list[float]) -> dict:
    some = seconds if len(seconds) > 1 else 2 * seconds  # quantiles of one are refused
    p20, p50, p80 = (statistics.quantiles(some, n=10, method="inclusive")[i] for i in (1, 4, 7))
    return {"p20": p20, "p50": p50, "p80": p80, "runs": len(seconds)}


def _on_cpu(call: Callable) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _on_gpu(device: torch.device) -> Callable:
    size = 2 * torch.cuda.get_device_properties(device).L2_cache_size
    waste = torch.empty(size, dtype=torch.uint8, device=device)

    def once(call: Callable) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(HEAD_START)
        waste.zero_()
        start.record()
        call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1000

    return once


def copy_bandwidth(device: torch.device, seconds: float) -> dict:
    """Bytes per second, read and written, of copying a tensor that no cache holds: {"bytes", "p20", "p50", "p80"}.

    The percentiles are those of the time, so that at p20 is the highest rate.
    """
    size = 2**30 if device.type == "cuda" else ON_CPU[0]
    source = torch.empty(size, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    times = measure({"copy": lambda: target.copy_(source)}, device, seconds=seconds, rounds=20)["copy"]
    return {"bytes": 2 * size} | {name: 2 * size / times[name] for name in ("p20", "p50", "p80")}


def matrix_product(device: torch.device, seconds: float, precision: str = "") -> dict:
    """FLOP per second (2 per multiply-add) of square products of random numbers.

    ``precision``: "bfloat16" or "float32"; by default the first on a GPU, the second on a CPU. {"dtype", "sizes":
    {side: at the median time}, "best"}; ``best`` is the ceiling that MFU is counted against.
    """
    on_gpu = device.type == "cuda"
    dtype = getattr(torch, precision or ("bfloat16" if on_gpu else "float32"))
    sizes, rates = (4096, 8192, 16384) if on_gpu else ON_CPU[1], {}
    for side in sizes:
        a, b = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
        out = torch.empty_like(a)
        times = measure(
            {"product": lambda a=a, b=b, out=out: torch.mm(a, b, out=out)}, device, seconds=seconds, rounds=30
        )
        rates[side] = 2 * side**3 / times["product"]["p50"]
    return {"dtype": str(dtype).removeprefix("torch."), "sizes": rates, "best": max(rates.values())}
