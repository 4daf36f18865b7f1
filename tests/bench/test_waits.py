"""What a trace of a training says of its waits, by events as the profiler writes them."""

from bench.waits import conclusions, seen


def event(kind, name, start, length, stream=None, thread=1):
    """From ``start``, for so many microseconds."""
    where = {"pid": 0, "tid": 0, "args": {"stream": stream}} if stream else {"pid": 1, "tid": thread}
    return {"cat": kind, "name": name, "ts": start, "dur": length, **where}


def test_waits_of_a_trace():
    """Three steps: 50 us behind the first, 4 ms behind the second, in which most of what the decoder does lies."""
    trace = seen([
        event("kernel", "step", 0, 10_000, 7), event("kernel", "step", 10_050, 10_000, 7),
        event("gpu_memcpy", "views", 24_050, 10, 7), event("kernel", "gather", 24_060, 9_990, 7),
        event("kernel", "decode", 19_050, 3_000, 20), event("kernel", "decode", 23_000, 500, 20),
        event("gpu_memset", "zero", 5_000, 1_000, 21), event("cuda_runtime", "cudaGraphLaunch", 0, 26_000),
        event("cuda_runtime", "cudaEventSynchronize", 100, 700, thread=5),
        event("cuda_runtime", "cudaEventSynchronize", 900, 300, thread=5),
        event("overhead", "Command Buffer Full", 0, 2_000), {"ph": "M", "name": "process_name"},
    ])  # fmt: skip
    assert trace == {
        "ms": 34.05, "waits_ms": 4.0,
        "waits": [{"ms": 4.0, "behind": "step", "before": "views", "meanwhile": {"20: decode": 2.5}}],
        "streams": [
            {"stream": 20, "launches": 2, "ms": 3.5, "ms_in_waits": 2.5},
            {"stream": 21, "launches": 1, "ms": 1.0, "ms_in_waits": 0.0},
        ],
        "calls": [
            {"thread": "training", "name": "cudaGraphLaunch", "calls": 1, "ms": 26.0, "longest_ms": 26.0},
            {"thread": "5", "name": "cudaEventSynchronize", "calls": 2, "ms": 1.0, "longest_ms": 0.7},
        ],
        "overheads": {"Command Buffer Full": {"calls": 1, "ms": 2.0, "longest_ms": 2.0}},
    }  # fmt: skip
    ways = [
        {"way": "as it is", "data_wait": 0.145, "pairs_per_second": 15152.0},
        {"way": "a stream of its own", "data_wait": 0.004, "pairs_per_second": 17700.0},
    ]
    runs = [
        {"queues": None, "ways": ways, "trace": trace},
        {"queues": 32, "ways": [], "trace": {}, "failed": "Error: no"},
    ]
    rows = conclusions({"recipe": "toy", "batch_size": 8, "runs": runs})["findings"]
    said = [(row["what"], row["result"], row.get("more", "")) for row in rows]
    assert said == [
        ("train.py waiting for data, toy, batch 8, default queues", "as it is 14.5 %, 15,150 pairs/s",
         "a stream of its own 0.4 %, 17,700 pairs/s"),
        ("waits of a trace of train.py, toy, batch 8, default queues", "4 of 34 ms",
         "2.5 of 4.5 ms of other streams lie in them; full buffer of commands: 2 ms"),
        ("train.py waiting for data, toy, batch 8, 32 longer queues", "failed: Error: no", ""),
    ]  # fmt: skip
