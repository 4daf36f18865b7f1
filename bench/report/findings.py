"""What the result files say in a line or two each: README's tables of results, which ``bench report`` puts there."""

import re
from dataclasses import dataclass

from bench.environment import ROOT
from bench.report.results import Result, by_folder, hardware, number, percent, short

VIEWS = "files to both augmented views, {image_size} px, batch {batch_size}"
STEP = "optimizer step, {model}, batch {batch_size}, synthetic crops"


@dataclass(frozen=True)
class Finding:
    what: str
    result: str
    source: Result
    commit: str


def findings(results: list[Result]) -> list[Finding]:
    """Rows of all results that may be reported, of each device and measurement the newest."""
    rows = {}
    for result in results:
        if result.data.get("tests") == "failed":
            lines = [(f"{result.subject} ({result.path.stem})", "no figures: its correctness tests failed")]
        else:
            lines = SUMMARIES[result.subject](result.data) if result.reported and result.subject in SUMMARIES else ()
        for what, text, *commit in lines:
            commit = short(commit[0]) if commit else result.commit
            rows.setdefault((result.machine["device"], what), Finding(what, text, result, commit))
    return list(rows.values())


# One function a subject: its figures -> what was measured, what came out and, if a row of its own, the commit


def _machine(d):
    product = d["flop_per_second"]
    yield (
        "ceilings",
        f"copies {number(d['copy_bytes_per_second']['p50'] / 1e9)} GB/s, read and written; "
        f"matrix products {number(product['best'] / 1e12)} TFLOP/s in {product['dtype']}",
    )


def _compile(d):
    targets = sorted({row["target"] for row in d["rows"]}, key=lambda name: (name[:2] != "sm", len(name), name))
    spilled = sum(row["spilled_bytes"] > 0 or row["spill_instructions"] > 0 for row in d["rows"])
    stores = {int(bits) for row in d["rows"] if row["kernel"] == "gather_patches" for bits in row["store_bits"]}
    yield (
        f"every kernel compiled for {', '.join(targets)}",
        f"{len(d['rows'])} programs, {spilled or 'none'} of which spill{'s' if spilled == 1 else ''}; the gather "
        f"stores {' or '.join(str(bits // 8) for bits in sorted(stores))} bytes at a time",
    )


def _kernels(d):
    """A line for each operation that has alternatives, its sizes side by side."""
    sizes = list(dict.fromkeys((row["size"], row["batch"]) for row in d["rows"]))
    for operation in dict.fromkeys(row["operation"] for row in d["rows"]):
        providers = {}
        for row in d["rows"]:
            if row["operation"] == operation:
                providers.setdefault(row["provider"], []).append(row)
        (_, ours), *others = providers.items()
        if others:
            times = ", ".join(f"{row['p50_us'] / 1e3:.3g}" for row in ours)
            against = [f"{name} {', '.join(number(row['times_ours']) for row in rows)}" for name, rows in others]
            what = "; ".join(f"{size}, batch {batch}" for size, batch in sizes)
            yield f"{operation} ({what})", f"{times} ms; times that: {'; '.join(against)}"


def _pipeline(d):
    rates = [row for row in d["rates"] if row["images/s"]]
    if all(row["provider"].startswith("this loader") for row in rates):  # on a GPU: by threads
        best = max(rates, key=lambda row: row["images/s"])
        yield VIEWS.format_map(d), f"{number(best['images/s'])} images/s ({best['provider']})"
        return
    ours, *others = rates
    text = f"{number(ours['CPU ms/image'])} ms of processor time an image, {number(ours['images/s'])} images/s; "
    text += "; ".join(f"{row['provider'].split(',')[0]} {number(row[TIMES])} times that time" for row in others)
    crop = [row["mean"] for row in d.get("parity", ()) if row["operation"] == "crop, flip, resize"]
    if crop:
        text += f"; crop and resize differ from torchvision's by {crop[0]:.2f} levels on the mean"
    yield VIEWS.format_map(d), text


TIMES = "times this loader's CPU"


def _input(d):
    rate = number(d["images_per_second"])
    yield f"{VIEWS.format_map(d)}, {d['threads']} threads", f"{rate} images/s from JPEGs of {_kilobytes(d)}"


def _kilobytes(d) -> str:
    return f"{d['mean_file_bytes'] / 1e3:.0f} kB"


def _soak(d):
    yield (
        f"{d['batches']:,} batches of {d['batch_size']} in {d['epochs']} epochs",
        f"the resident set grows by {d['grown_mib']:.1f} MiB after the first tenth; {d['found']} of {d['damaged']} "
        f"damaged files found; {d['probes_in_first_epoch']} batches probed in the first epoch, "
        f"{d['probes_later']} later",
    )


def _step_variants(d):
    best = {}
    for row in sorted(d["rows"], key=lambda row: row["pairs_per_second"]):
        best[row["variant"].split(",")[0]] = row
    peaks = re.search(r"(\d+) to (\d+) TFLOP/s", d["note"])
    for model, row in sorted(best.items(), reverse=True):
        rate = row["pairs_per_second"] * row["flop_per_pair"] / 1e12
        share = f" ({percent(2 * rate / (float(peaks[1]) + float(peaks[2])))} of what products reach)" if peaks else ""
        yield (
            STEP.format(model=model, **d),
            f"{number(row['pairs_per_second'])} pairs/s, {number(row['step_seconds']['p50'] * 1e3)} ms; "
            f"{number(rate)} TFLOP/s{share}; {number(row['peak_memory_bytes'] / 2**30)} GiB of memory at most",
            row["commit"],
        )


def _step(d):
    for mode in ("plain", "float32", "eager", "compiled"):
        if mode in d:
            found = d[mode]
            text = f"{number(found['pairs_per_second'])} pairs/s, {number(found['step_seconds']['p50'] * 1e3)} ms"
            if mode != "plain" and "times_plain" in found:
                text += f", {number(found['times_plain']['p50'])} times the plain form"
            text += f"; {percent(found['mfu'])} of the best matrix product"
            text += f", {percent(found['roofline_share'])} of the roofline"
            if found.get("peak_memory_bytes"):
                text += f"; {number(found['peak_memory_bytes'] / 2**30)} GiB of memory at most"
            yield f"{STEP.format_map(d | {'model': d['recipe']})}, {mode} ({found['precision']})", text


def _kernel_variants(d):
    rows, copy = d["rows"], d["copy_bytes_per_second"]
    gather, sample = rows["gather pair imagenet 14x14 lanes 128 warps 2"], rows["sample imagenet 14x14 warps 1"]
    yield (
        "gather of a group, both views, 14 x 14 patches of 16 px, batch 512",
        f"{number(gather['p50'] * 1e6)} us: {percent(gather['share'])} of the {number(copy / 1e9)} GB/s of a copy",
    )
    yield (
        "sampling of all four groups, 14 x 14 patches, batch 512",
        f"{number(sample['p50'] * 1e6)} us (52-bit random numbers)",
    )


def _backends(d):
    means = [view[0] for name, row in d["rows"].items() if name.startswith("difference") for view in row]
    yield "DALI's GPU backend against its CPU backend", f"{min(means):.2f}-{max(means):.2f} levels mean difference"
    alone = {name.split()[1]: rate for name, rate in d["rows"].items() if re.fullmatch(r"decode \S+ 6", name)}
    text = ", ".join(f"{load}: {number(rate)}" for load, rate in sorted(alone.items()))
    yield "decoding alone, 6 threads, by the share given to the hardware engines", f"{text} images/s"


def _gpu_tests(d):
    counts = ", ".join(f"{d[name]} {name}" for name in ("passed", "failed", "skipped") if d[name])
    yield "tests marked `gpu`", counts


def _train(d):
    steady = [line for line in d["metrics"] if "data_wait" in line]
    steady = [line for line in steady if line["step"] > steady[-1]["step"] / 2]
    rates, waits = ([line[name] for line in steady] for name in ("pairs_per_second", "data_wait"))
    spans = f"{number(min(rates))}-{number(max(rates))}, {100 * min(waits):.1f}-{percent(max(waits))}"
    yield (
        f"train.py on files, {d['recipe']}, batch {d['batch_size']}",
        f"{number(d['pairs_per_second'])} pairs/s, {percent(d['data_wait'])} of the time waiting for data after "
        f"warm-up (lines of the log: {spans})",
    )
    for row in d.get("runs", ()):
        ranks = f"{row['ranks']} rank{'s' * (row['ranks'] > 1)}"
        needed, alone = (number(row[f"images_per_second_{name}"]) for name in ("needed", "alone"))
        yield (
            f"what limits train.py, {d['recipe']}, batch {d['batch_size']}, {ranks}",
            f"the {row['limited_by']}: {number(row['pairs_per_second'])} pairs/s, {percent(row['data_wait'])} of the "
            f"time waiting for data; a rank needs {needed} images/s, its input alone (threads: {row['threads']}) "
            f"gives {alone}, enough for {number(row['ranks_fed'])} such ranks; threads to balance one: "
            f"{row['threads_to_balance']}",
        )


def _learning(d):
    def accuracy(mean, spread):
        return "-" if mean is None else f"{mean:.1f} %" + (f" +- {spread:.1f}" if spread is not None else "")

    for row in d["rows"]:
        text = f"{accuracy(row['top1'], row['top1_spread'])} after fine-tuning; runs: {row['runs']}"
        if row["knn"] is not None:
            text += f"; k-NN {accuracy(row['knn'], row['knn_spread'])}, untrained {row['knn_untrained']:.1f} %"
        parts = ("pretraining", row["steps"]), ("fine-tuning", row["tuning_steps"])
        steps = ", ".join(f"{count:,} steps of {what}" for what, count in parts if count)
        yield f"accuracy: {row['arm']}; {steps}", text


def _baselines(d):
    for row in d["claims"]:
        about = f"{row['APS takes of']} over that of APS, counting {row['counting']}; claimed: {row['claim']}"
        rest = (f"{key}: {value}" for key, value in row.items() if key not in ("APS takes of", "counting", "claim"))
        yield about, "; ".join(rest)


def _demo(d):
    for row in d["rows"]:
        yield (f"k-NN on the embedded dataset, `{row['command']}`",
               f"{row['knn_trained']:.1f} %, untrained {row['knn_untrained']:.1f} %")  # fmt: skip
    for name, seconds in d.get("seconds", {}).items():
        yield f"`{name}`, after installation", f"{seconds // 60:.0f} min {seconds % 60:.0f} s"


SUMMARIES = {
    "machine": _machine, "gpu_tests": _gpu_tests, "step variants": _step_variants, "step": _step, "input": _input,
    "pipeline": _pipeline, "train": _train, "kernel variants": _kernel_variants, "kernels": _kernels,
    "DALI on CPU and GPU": _backends, "compile": _compile, "soak": _soak, "learning": _learning, "demo": _demo,
    "baselines": _baselines,
}  # fmt: skip


# The tables of README

HEADLINES = (  # what is said first: rows by what they begin with, and how many clauses of their result
    ("optimizer step, ViT-S", 1), ("optimizer step, ViT-B", 1),
    ("files to both augmented views, 224 px, batch 512, 6 threads", 1), ("gather of a group", 1),
    ("optimizer step, imagenet-vit-s, .*eager", 1), ("files to both augmented views, 224 px, batch 64", 2),
    ("MoCo v3's compute .* blocks", 3),
)  # fmt: skip


def headline(results: list[Result]) -> str:
    """The figures that a reader meets first."""
    rows, lines = findings(results), ["| what | measured or counted | on |", "|---|---|---|"]
    for pattern, clauses in HEADLINES:
        for row in [row for row in rows if re.match(pattern, row.what)][:1]:
            text = "; ".join(row.result.split("; ")[:clauses])
            lines.append(f"| {row.what} | {text} | {row.source.machine['device']} |")
    return "\n".join(lines) + "\n"


def scaling(results: list[Result]) -> str:
    """What several GPUs should give, by ``bench scaling``: both models in each cell."""
    found = next((result.data for result in results if result.subject == "scaling" and result.reported), None)
    if found is None:
        return "Not predicted: no result of `python -m bench scaling`.\n"
    models = {name: rows for name, rows in found.items() if isinstance(rows, list)}
    columns = list(zip(*models.values(), strict=True))
    gpus = [(c[0]["gpus"], c[0]["images_per_gpu"] * c[0]["gpus"]) for c in columns]
    heads = [f"{n} GPU{'s' if n > 1 else ''}, batch {batch:,}" for n, batch in gpus]
    figures = {
        "step (ms)": "step_ms", "pairs/s": "pairs_per_second", "share of that many single GPUs": "efficiency",
        "images/s for a node to decode": "node_images_per_second", "GB/s for a node to read": "node_gb_per_second",
        "seconds for a pass over ImageNet": "epoch_seconds",
    }  # fmt: skip
    lines = [f"| {', '.join(models)} | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|"]
    for label, name in figures.items():
        show = percent if name == "efficiency" else number
        cells = (", ".join(show(row[name]) for row in column) for column in columns)
        lines.append(f"| {label} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def markdown(results: list[Result], *, folded: bool = True) -> str:
    """All findings, a table a folder; a row names its file and the commit measured."""
    rows, order, blocks = findings(results), list(SUMMARIES), []
    folders = by_folder(results)
    for folder in folders:
        found = [row for row in rows if row.source.path.parent == folder]
        if not found:
            continue
        found.sort(key=lambda row: order.index(row.source.subject) if row.source.subject in order else len(order))
        name = folder.relative_to(ROOT) if folder.is_relative_to(ROOT) else folder.name
        date = f" {found[0].source.date}," if found[0].source.date else ""
        small = " small sizes," * any(row.source.data.get("scale") == "small" for row in found)
        title = f"{hardware([r.source for r in found])};{date}{small}"
        lines = ["| what | result | command | file | commit |", "|---|---|---|---|---|"]
        for row, above in zip(found, [None, *found], strict=False):
            command = "as above" if above and above.source is row.source else row.source.command
            cells = row.what, row.result, command, f"`{row.source.path.name}`", row.commit
            lines.append("| " + " | ".join(cells) + " |")
        table = "\n".join(lines)
        if folded:
            summary = f"<summary>{title} {len(found)} figures in <code>{name}/</code></summary>"
            blocks.append(f"<details>{summary}\n\n{table}\n\n</details>")
        else:
            blocks.append(f"{title} in `{name}/`:\n\n{table}")
    return "\n\n".join(blocks) + "\n"


README = {"headline": headline, "scaling": scaling, "results": markdown}  # by the name of their markers
