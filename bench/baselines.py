"""What a training step costs: APS beside MoCo v3, MAE, SimMIM and iBOT (``bench/methods.py``), counted and measured.

All on timm's plain ViT of a recipe, nothing compiled, attention torch's; ``bench step`` has what train.py makes of APS.

FLOP an image: 2 per multiply-add, matrix products only (the two of attention included), forward, backward and momentum
networks. Backward is twice forward; once where the input needs no gradient, as that of a patch embedding, whose weights
may be frozen besides. Attention over T tokens of width D: 4 T^2 D forward, its weights not computed again for the
backward pass. ``run.training.flop_per_pair`` counts the same way. ``blocks`` are the linear layers of transformer
blocks alone, decoder included, with the class token: what gives the paper's figures of APS and MoCo v3. Each figure is
counted twice: by torch's FLOP counter, of a step on tensors without memory, and by formula (``parts`` of a method).

Memory: ``kept`` are the bytes that autograd saves for the backward pass at the batch of the paper's figures, in
bfloat16 autocast, each storage once and parameters not at all, of a step without memory again. ``unfused``: where
attention is written out and its T x T weights are kept, as was usual when the paper was written.
``state`` are weights, gradients, AdamW's moments and momentum networks, in float32. ``peak``, on a GPU only: the most
that real steps of ``--batch-size`` images held, state included.

Time: real steps in turns, with AdamW and the momentum update, inputs made beforehand; on a CPU of the smallest size.
"""

import contextlib
import dataclasses
import gc

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from bench import environment
from bench.findings import bar, finding, plot
from bench.methods import METHODS, Method
from bench.step import saved_bytes
from bench.timing import measure
from run.recipes import RECIPES, Config
from run.training import in_half

SIZES = {
    "T/2": "cifar-vit-t", "S/2": "cifar-vit-s", "B/2": "cifar-vit-b", "S/16": "imagenet-vit-s", "B/16": "imagenet-vit-b"
}  # fmt: skip
SMALL = {"depth": 1, "head_hidden": 64, "image_size": 16}  # what ``--smoke`` changes
BATCH = 512  # of the paper's figures
PAPER = {  # APS's table: GFLOP an image and GB at batch 512 of T/2, S/2, B/2; of iBOT the first two
    "APS": ((4.2, 16.2, 66.2), (9.0, 16.2, 33.1)),
    "MoCo v3": ((21.9, 87.6, 348.2), (40.0, 80.0, 159.3)),
    "MAE": ((4.8, 19.2, 76.2), (13.3, 25.5, 50.8)),
    "SimMIM": ((6.0, 24.6, 97.6), (28.6, 57.9, 115.3)),
    "iBOT": ((59.6, 238.5), (58.5, 105.3)),
}
CLAIMS = (  # of its text: APS takes 1 / (from this number to that) of what that method does
    ("MoCo v3", "compute", (5, 5)),
    ("iBOT", "compute", (15, 15)),
    ("MoCo v3", "memory", (5, 6)),
    ("iBOT", "memory", (5, 6)),
)
COUNTS = {
    "compute": {"blocks": "blocks", "all products": "flop"},
    "memory": {"attention fused": "kept_bytes", "unfused": "kept_bytes_unfused"},
}
ABOUT = 0.1  # by which a claim may be off


@contextlib.contextmanager
def without_memory(kind: type[Method], config: Config):
    """The method on the CPU, with parameters, and all that is computed inside, that have shapes and no values."""
    with torch.device("meta"):
        method = kind(config)
    with FakeTensorMode():
        for module in method.modules():
            for name, old in module.named_parameters(recurse=False):
                setattr(module, name, nn.Parameter(torch.empty(old.shape), requires_grad=old.requires_grad))
            for name, old in module.named_buffers(recurse=False):
                setattr(module, name, torch.empty(old.shape))
        yield method


def counted_flop(kind: type[Method], config: Config, batch: int) -> int:
    """Of a step, by torch's counter. Attention is written out: it has no formula for what the CPU does instead."""
    attention = sdpa_kernel(SDPBackend.MATH)
    with without_memory(kind, config) as method, attention, FlopCounterMode(display=False) as counter:
        method(*method.inputs(batch, torch.device("cpu"))).backward()
    return counter.get_total_flops()


def kept_bytes(kind: type[Method], config: Config, batch: int, *, fused: bool) -> int:
    """That autograd saves for the backward pass of a step in bfloat16, with ``fused`` attention or written out."""
    attention = contextlib.nullcontext() if fused else sdpa_kernel(SDPBackend.MATH)
    with without_memory(kind, config) as method, attention, torch.autocast("cpu", torch.bfloat16):
        inputs = method.inputs(batch, torch.device("cpu"))
        return saved_bytes(lambda: method(*inputs), method.parameters())


def state_bytes(method: nn.Module) -> int:
    """Of weights, and of trained ones the gradient and AdamW's two moments."""
    return sum(4 * p.numel() * (4 if p.requires_grad else 1) for p in method.parameters())


def count(kind: type[Method], config: Config) -> dict:
    with torch.device("meta"):
        method = kind(config)
    flop = {}
    for part in method.parts(BATCH):
        flop[part.name] = flop.get(part.name, 0) + part.flop * part.times
    return {
        "flop": counted_flop(kind, config, BATCH) / BATCH, "flop_by_formula": sum(flop.values()), "flop_of_parts": flop,
        "kept_bytes": kept_bytes(kind, config, BATCH, fused=True),
        "kept_bytes_unfused": kept_bytes(kind, config, BATCH, fused=False), "state_bytes": state_bytes(method),
    }  # fmt: skip


class Step:
    """A real step of a method on random patches."""

    def __init__(self, kind: type[Method], config: Config, batch: int, device: torch.device):
        self.method = kind(config).to(device)
        self.half = in_half(config, device)
        self.optimizer = torch.optim.AdamW([p for p in self.method.parameters() if p.requires_grad], fused=True)
        self.inputs = self.method.inputs(batch, device)

    def __call__(self) -> None:
        with torch.autocast(self.inputs[0].device.type, torch.bfloat16, enabled=self.half):
            loss = self.method(*self.inputs)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.method.update_averages()


def measured(config: Config, batch: int, device: torch.device, seconds: float) -> dict[str, dict]:
    """Of each method the time of a step, and on a GPU the most memory that it held."""
    steps, peaks = {}, {}
    for name, kind in METHODS.items():
        if device.type == "cuda":
            gc.collect()
            torch.cuda.reset_peak_memory_stats(device)
            before = torch.cuda.memory_allocated(device)  # by the methods before
        steps[name] = Step(kind, config, batch, device)
        if device.type == "cuda":
            for _ in range(2):
                steps[name]()
            peaks[name] = torch.cuda.max_memory_allocated(device) - before
    times = measure(steps, device, seconds=seconds)
    how = {"images": batch, "precision": "bfloat16" if in_half(config, device) else "float32"}
    return {name: how | {"step_seconds": times[name], "peak_bytes": peaks.get(name)} for name in METHODS}


def quotients(sizes: dict[str, dict], name: str, what: str) -> list[float]:
    """Of a method and APS, at each size. ``what``: a figure, or "blocks"; of bytes those of the state are added."""

    def cost(found: dict) -> float:
        if what == "blocks":
            return found["flop_of_parts"]["blocks"]
        return found[what] + (found["state_bytes"] if what.startswith("kept") else 0)

    return [cost(methods[name]) / cost(methods["APS"]) for methods in sizes.values()]


def verdict(found: list[float], low: float, high: float) -> str:
    """Whether all the quotients are about what is claimed."""
    low, high = low * (1 - ABOUT), high * (1 + ABOUT)
    if max(found) < low:
        return "less than claimed"
    if min(found) > high:
        return "more than claimed"
    return "holds" if low <= min(found) and max(found) <= high else "at some sizes"


def check_claims(sizes: dict[str, dict]) -> list[dict]:
    """The claims of the paper beside the quotients of its own table and of what was counted, as "smallest-largest"."""
    rows = []
    for name, what, claim in CLAIMS:
        column, counts = ("compute", "memory").index(what), COUNTS[what]
        for count_of, key in counts.items():
            paper = [a / b for a, b in zip(PAPER[name][column], PAPER["APS"][column], strict=False)]
            small, large = (
                quotients({size: m for size, m in sizes.items() if size.endswith(side)}, name, key)
                for side in ("/2", "/16")
            )
            rows.append({
                "APS takes of": f"{name}'s {what}", "claim": " to ".join(f"1/{x}" for x in sorted(set(claim))),
                "counting": count_of, "its table": _range(paper), "32 px": _range(small), "224 px": _range(large),
                "at 32 px": verdict(small, *claim),
            })  # fmt: skip
    return rows


def _range(values: list[float]) -> str:
    if not values:
        return "-"
    return " to ".join(sorted({f"{min(values):.1f}", f"{max(values):.1f}"}, key=float))


def conclusions(d: dict) -> dict:
    """A row for each claim; the first is the one that README's first lines rest on."""
    found, panels = [], {}
    for row in d["claims"]:
        about = f"{row['APS takes of']} over that of APS, counting {row['counting']}; claimed: {row['claim']}"
        ranges = "; ".join(f"{key}: {row[key]}" for key in ("its table", "32 px", "224 px"))
        first = "" if found else "compute"
        found.append(finding(about, ranges, f"at 32 px: {row['at 32 px']}", headline=first))
    for size, methods in d["sizes"].items():
        bars = (bar(name, of["flop"] / 1e9, ours=name == "APS") for name, of in methods.items())
        panels[f"ViT-{size}"] = [*bars]
    return {"findings": found, "plots": [plot("Arithmetic of a training step", "GFLOP an image", panels)]}


def show(sizes: dict[str, dict], claims: list[dict]) -> None:
    rows, real = [], []
    for number, (size, methods) in enumerate(sizes.items()):
        base = methods["APS"]
        for name, found in methods.items():
            paper = [  # of MAE with either decoder
                dict(enumerate(column)).get(number) if size.endswith("/2") else None
                for column in PAPER[name.split(",")[0]]
            ]
            rows.append({
                "ViT": size, "method": name, "GFLOP": found["flop"] / 1e9, "x APS": found["flop"] / base["flop"],
                "blocks": found["flop_of_parts"]["blocks"] / 1e9,
                "x APS ": found["flop_of_parts"]["blocks"] / base["flop_of_parts"]["blocks"], "paper": paper[0],
                "kept GB": found["kept_bytes"] / 1e9, "x APS  ": found["kept_bytes"] / base["kept_bytes"],
                "unfused": found["kept_bytes_unfused"] / 1e9, "paper ": paper[1],
                "state GB": found["state_bytes"] / 1e9,
            })  # fmt: skip
            if "step_seconds" in found:
                seconds, peak = found["step_seconds"], found["peak_bytes"]
                real.append({
                    "ViT": size, "method": name, "images": found["images"], "type": found["precision"],
                    **{f"ms {p}": seconds[p] * 1e3 for p in ("p20", "p50", "p80")},
                    "x APS": seconds["p50"] / base["step_seconds"]["p50"],
                    "peak GB": None if peak is None else peak / 1e9,
                })  # fmt: skip
    print(f"GFLOP an image, of all products and of the blocks' linear layers; GB at batch {BATCH} in bfloat16")
    for table in (rows, claims, real):
        environment.print_table(table)
        print()


def main(arguments: list[str]) -> int:
    parser = environment.parser("baselines", "APS beside MoCo v3, MAE, SimMIM and iBOT: FLOPs, memory, time of a step.")
    parser.add_argument("--batch-size", type=int, help="images of real steps; default: 64 on a GPU, 4 on a CPU")
    options, device = parser.parse_args(arguments), environment.device()
    on_gpu = device.type == "cuda"
    batch = options.batch_size or (64 if on_gpu else 4)
    configs, seconds = {size: RECIPES[recipe] for size, recipe in SIZES.items()}, 10 if on_gpu else 30
    if options.smoke:
        configs, seconds, batch = {"T/2": dataclasses.replace(configs["T/2"], **SMALL)}, 0, 2
    sizes = {}
    for number, (size, config) in enumerate(configs.items()):
        sizes[size] = {name: count(kind, config) for name, kind in METHODS.items()}
        if on_gpu or number == 0:
            for name, found in measured(config, batch, device, seconds).items():
                sizes[size][name] |= found
    claims = check_claims(sizes)
    if options.smoke:
        print(f"--smoke: {SMALL}, not to be compared with the paper")
    result = {"batch": BATCH, "sizes": sizes, "claims": claims}
    environment.save(options, result | conclusions(result))
    show(sizes, claims)
    return 0
