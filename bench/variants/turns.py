"""``bench step --variants``: each variant alone, then those that pay together, in turns with train.py's step.

Those from which most is expected come first; the result is written after each, so that what is cut off has less to say.
What fails stops no other: where it takes the GPU with it, those left run in a new process.

Before it is timed, a variant takes the first steps from the same weights on the same patches as the base has:

- ``loss_difference``: the largest of those steps, relative; ``exact`` variants may differ by what the base's losses
  differ from float32's and the rounding of one number (2^-8 in bfloat16, 1e-5 in float32); others are not held to it.
- ``gradient_distance``: of the first step, to that of the float32 step, relative (L2 norm); ``exact`` variants may be
  1.5 times as far away as the base is, and 1e-4 further.
- ``key_cosine``: of the first step's keys with the base's, in the mean; variants that are not exact have to reach
  ``key_cosine_wanted``, at weights of the start, where batch normalisation blows up what little images differ by. What
  their network is worth says only the k-NN accuracy of a run.

``together``: those within their tolerance that saved time on a GPU; on a CPU, where times say nothing, all that ran. Of
two that change the same place it is the one whose numbers are nearer, then the one that saved more: keys in fp8 only
where they alone are asked for. What cannot be run is "not run", with the reason, and counts as nothing else.
"""

import dataclasses
import gc
import json
import os
import sys
from collections.abc import Callable

import torch
import torch._dynamo
import torch.nn.functional as F
from torch import Tensor

from bench import environment
from bench.findings import bar, failure, finding, number, plot, without_figures
from bench.step import Synthetic, time_in_turns, wait
from bench.variants.changes import BY_NAME, apply, compatible
from run.recipes import Config

SMALL = {"model": "vit_tiny_patch16_224", "image_size": 64, "depth": 3, "head_hidden": 64, "groups": 2, "batch_size": 8}
PREDICTED = {"imagenet-vit-s": 0, "imagenet-vit-b": 1}  # place in ``Variant.predicted``
GO_ON = "BENCH_VARIANTS_GO_ON"  # in the environment: --json has rows of a process that could not go on
COMPILED = 128  # forms of one function at once: each variant is one or two


@dataclasses.dataclass
class Course:
    """First steps: losses [steps], gradient [n] and keys [2,B,E] of the first one (None without a momentum network)."""

    losses: Tensor
    gradient: Tensor
    keys: Tensor | None


def course(synthetic: Synthetic) -> Course:
    """The steps of one batch, from the beginning; on a GPU of two, as those of the second come from graphs."""
    training, losses, kept = synthetic.training, [], {}
    step, key = training.step, training.key

    def noted_key(*args):
        found = key(*args)
        if "keys" not in kept:
            kept["keys"] = found.detach().clone()
        return found

    def noted_step(*args, **more):
        (loss, *figures), finite = step(*args, **more)
        losses.append(loss.detach().clone())
        if "gradient" not in kept:
            kept["gradient"] = training.flat.gradient.clone()
        return (loss, *figures), finite

    training.step, training.key = noted_step, None if key is None else noted_key
    for _ in range(1 + training.on_gpu):
        synthetic.batch()
    training.step, training.key = step, key
    return Course(torch.stack(losses), kept["gradient"], kept.get("keys"))


def distance(gradient: Tensor, other: Tensor) -> float:
    return ((gradient - other).norm() / other.norm()).item()


def compare(found: Course, base: Course, exact: Course, names: list[str], *, half: bool) -> dict:
    """What the module's docstring says; ``exact``: the float32 step's."""
    result = {
        "loss_difference": ((found.losses - base.losses) / base.losses).abs().max().item(),
        "gradient_distance": distance(found.gradient, exact.gradient),
        "gradient_distance_of_base": distance(base.gradient, exact.gradient),
    }
    if base.keys is not None:
        result["key_cosine"] = F.cosine_similarity(found.keys.float(), base.keys.float(), dim=-1).mean().item()
    wanted = [BY_NAME[name].cosine for name in names if not BY_NAME[name].exact]
    if wanted:
        result["key_cosine_wanted"] = min(wanted)
        return result | {"within": result["key_cosine"] >= min(wanted)}
    own = ((base.losses - exact.losses) / exact.losses).abs().max().item()
    result["loss_tolerance"] = own + (2**-8 if half else 1e-5)
    result["gradient_tolerance"] = 1.5 * result["gradient_distance_of_base"] + 1e-4
    within = all(result[what] <= result[f"{of}_tolerance"] for what, of in
                 (("loss_difference", "loss"), ("gradient_distance", "gradient")))  # fmt: skip
    return result | {"within": within}


def one(
    config: Config, device: torch.device, mode: str, loaded=None, names: list[str] = ()
) -> tuple[Synthetic, Course]:
    """A step of its own with some variants, after its course."""
    torch.manual_seed(0)
    synthetic = Synthetic(config, device, mode=mode)
    synthetic.loaded = loaded or synthetic.loaded
    apply(names, synthetic.training)
    return synthetic, course(synthetic)


def let_go(device: torch.device) -> None:
    """Memory of what is gone, which graphs could not take from where it is kept."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()


def lost(device: torch.device) -> bool:
    """Whether nothing runs in this process any more, as after a kernel that read beside its memory."""
    try:
        wait(device)
    except RuntimeError:
        return True
    return False


def measure(
    config: Config, device: torch.device, names: list[str], turns: int, rows: list, save: Callable[[], None]
) -> None:
    """Adds to ``rows`` one for each variant and for those together, unless it has it; ``save`` is called after each."""
    order = [*sorted(set(names), key=lambda name: (-BY_NAME[name].predicted[0], name)), "together"]
    order = [name for name in order if name not in {row["name"] for row in rows}]
    if not order:
        return
    mode = "graph" if device.type == "cuda" else "eager"
    float32, exact = one(config, device, "float32")
    loaded = float32.loaded
    del float32
    let_go(device)
    base, first = one(config, device, mode, loaded)
    half, on_gpu = base.training.half, device.type == "cuda"
    for _ in range(2 * on_gpu):  # until graphs are recorded
        base.batch()
    place = PREDICTED.get(config.recipe) if on_gpu and config.batch_size == 512 and not config.depth else None

    def row_of(what: str, applied: list[str]) -> dict:
        row = {"name": what, "applied": applied}
        if place is not None:
            row["predicted_ms"] = sum(BY_NAME[name].predicted[place] for name in applied)
        missing = [reason for name in applied if (reason := BY_NAME[name].missing(base.training))]
        if missing or not applied:
            return row | {"not_run": "; ".join(missing) or "no variant saved time"}
        let_go(device)
        try:
            other, found = one(config, device, mode, loaded, applied)
            row |= compare(found, first, exact, applied, half=half)
            for _ in range(2 * on_gpu):
                other.batch()
            times = time_in_turns({"plain": base, what: other}, config, device, turns)
        except Exception as error:  # one that fails stops no other
            return row | {"failed": failure(error)}
        if recorded := getattr(other.training, "recorded", None):
            row["in_a_graph"] = not recorded.failed
        saved = (times["plain"]["step_seconds"]["p50"] - times[what]["step_seconds"]["p50"]) * 1e3
        row |= {"base": times["plain"]["step_seconds"], "step_seconds": times[what]["step_seconds"]}
        return row | {"times_base": times[what]["times_plain"], "saved_ms": saved}

    def those_that_pay() -> list[str]:
        ran = [row for row in rows if "saved_ms" in row and row["within"] and (row["saved_ms"] > 0 or not on_gpu)]
        best = sorted(ran, key=lambda row: (-(BY_NAME[row["name"]].cosine or 1), -row["saved_ms"] * on_gpu))
        return compatible([row["name"] for row in best])

    for name in order:
        rows.append(row_of(name, those_that_pay() if name == "together" else [name]))
        save()
    wait(device)


def conclusions(d: dict) -> dict:
    """A row and a bar for each variant that ran, a row for those that did not."""
    found, bars = [], []
    for row in d["rows"]:
        what = f"variant {row['name']}, {d['recipe']}, batch {d['batch_size']}"
        if without_figures(row):
            found.append(finding(what, without_figures(row)))
            continue
        saved = [f"{row['saved_ms']:+.2f} ms saved of {number(row['base']['p50'] * 1e3)}"]
        if "predicted_ms" in row:
            saved.append(f"predicted {row['predicted_ms']:+.2f}")
        same = (
            f"losses differ by {row['loss_difference']:.1e}, gradients by {row['gradient_distance']:.1e} from float32's"
        )
        keys = [f"cosine of keys {row['key_cosine']:.5f}"] if "key_cosine" in row else []
        of = [f"of {', '.join(row['applied'])}"] if row["name"] == "together" else []
        verdict = "within tolerance" if row["within"] else "outside of its tolerance"
        eager = [] if row.get("in_a_graph", True) else ["could not be recorded as a graph"]
        found.append(finding(what, ", ".join(saved), *of, same, *keys, verdict, *eager))
        bars.append(bar(row["name"], row["saved_ms"]))
    plots = (
        [plot("Variants of the step", "ms saved", {f"{d['recipe']}, batch {d['batch_size']}": bars})] if bars else []
    )
    return {"findings": found, "plots": plots}


def main(options, config: Config, device: torch.device) -> int:
    """``options.variants``: names, none for all. Exit code 1 where one failed or left its tolerance."""
    if unknown := sorted(set(options.variants) - set(BY_NAME)):
        print(f"--variants {' '.join(unknown)}: expected some of {', '.join(BY_NAME)}", file=sys.stderr)
        return 2
    names = [name for name in BY_NAME if name in options.variants] or list(BY_NAME)
    turns, result = options.turns, {"recipe": config.recipe, "model": config.model, "groups": config.groups}
    if options.smoke:
        config, turns, result = dataclasses.replace(config, **SMALL), 2, result | SMALL
    result |= {"batch_size": config.batch_size}

    rows = json.loads(options.json.read_text())["rows"] if os.environ.pop(GO_ON, "") else []

    def save():
        found = result | {"rows": rows}
        environment.save(options, found | conclusions(found))
        if "failed" in rows[-1] and options.json and lost(device):
            print(f"{rows[-1]['name']}: {without_figures(rows[-1])}; the others in a new process", flush=True)
            os.environ[GO_ON] = "1"
            os.execv(sys.executable, [sys.executable, "-m", "bench", *sys.argv[1:]])

    with torch._dynamo.config.patch(recompile_limit=COMPILED):
        measure(config, device, names, turns, rows, save)
    columns = ("predicted_ms", "saved_ms", "loss_difference", "gradient_distance", "gradient_tolerance", "key_cosine")
    environment.print_table([
        {"variant": row["name"]}
        | {column: row.get(column) for column in columns}
        | {"verdict": without_figures(row) or ("within tolerance" if row["within"] else "outside of its tolerance")}
        for row in rows
    ])  # fmt: skip
    print(*(f"together: {', '.join(row['applied'])}" for row in rows if row["name"] == "together"))
    return int(any("failed" in row or not row.get("within", True) for row in rows))
