"""Fine-tuning as a user calls it: on a CPU, on images of three classes that are told apart by their stripes."""

import json
import math
import shutil
import signal

import numpy as np
import pytest
import timm
import torch
from conftest import metrics, run_program
from PIL import Image
from safetensors.torch import load_file, save_file

import finetune
from model.encoder import create_plain
from pipeline import inflight
from run.signals import StopRequest
from transfer.finetuning import new_model

TINY = (
    "--recipe", "toy",
    "--device", "cpu", "--precision", "float32", "--threads", "1", "--model", "vit_tiny_patch16_224", "--depth", "1",
    "--image-size", "32", "--patch-size", "8", "--batch-size", "12", "--epochs", "6", "--log-every", "3",
    "--checkpoint-every", "100", "--mixup", "0.8", "--cutmix", "1", "--erasing", "0.25", "--lr", "1e-3",
    "--ema", "0.9", "--operations", "0",
)  # fmt: skip


def stripes(root, per_class, seed):
    """Images striped along, across and not at all; returns the folder."""
    rng = np.random.default_rng(seed)
    wave = (np.arange(36) // 4 % 2 * 160)[:, None, None]
    for number, name in enumerate(("along", "across", "plain")):
        (root / name).mkdir(parents=True)
        for i in range(per_class):
            noise = rng.integers(0, 96, (36, 36, 3))
            image = noise + (0, wave, wave.transpose(1, 0, 2))[number]
            Image.fromarray(image.astype(np.uint8)).save(root / name / f"{i:02}.jpg", quality=95)
    return root


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    root = tmp_path_factory.mktemp("stripes")
    stripes(root / "train", 20, 0)
    stripes(root / "val", 9, 1)
    (root / "val" / "plain" / "cut.jpg").write_bytes((root / "val" / "plain" / "00.jpg").read_bytes()[:-100])
    return root


def tune(data, output, *more):
    arguments = ["--data", data / "train", "--eval-data", data / "val", "--output", output]
    finetune.main([*TINY, *map(str, arguments), *more])


@pytest.fixture(scope="module")
def tuned(data, tmp_path_factory):
    """60 images, batches of 12, 6 epochs of 5 batches: 30 steps."""
    output = tmp_path_factory.mktemp("tuned") / "run"
    tune(data, output)
    return output


def test_learns_and_exports_what_it_measured(data, tuned):
    logged = [line for line in metrics(tuned) if "loss" in line]
    scores = [line for line in metrics(tuned) if "top1" in line]
    assert [line["step"] for line in logged] == [1, *range(3, 31, 3)]
    assert [line["step"] for line in scores] == list(range(5, 31, 5))
    assert "top5" not in scores[-1]  # of three classes
    assert (scores[-1]["eval_images"], scores[-1]["left_out"]) == (27, 1)
    assert scores[-1]["top1"] > 80 and scores[-1]["top1_ema"] > 80  # by chance 33
    for name, key in (("model", "top1"), ("model_ema", "top1_ema")):
        vit = timm.create_model(f"local-dir:{tuned / name}", pretrained=True).eval()
        known, training = vit.pretrained_cfg, json.loads((tuned / name / "config.json").read_text())["training"]
        assert known["label_names"] == ["across", "along", "plain"] and training["top1"] == scores[-1][key]
        right = []
        for number, label in enumerate(known["label_names"]):
            files = sorted((data / "val" / label).glob("[0-9]*.jpg"))
            images = np.stack([np.asarray(Image.open(file).resize((32, 32), Image.BILINEAR)) for file in files])
            pixels = (torch.tensor(images) / 255 - torch.tensor(known["mean"])) / torch.tensor(known["std"])
            right += (vit(pixels.permute(0, 3, 1, 2)).argmax(1) == number).tolist()
        assert 100 * np.mean(right) == pytest.approx(scores[-1][key], abs=8)  # two images: Pillow's resize is another


def test_stopped_by_a_signal_and_continued_gives_the_same_bytes(data, tuned, tmp_path, monkeypatch, capsys):
    """SIGTERM while it evaluates, then the same command; the 7 steps that are saved end within an epoch."""
    seen = StopRequest.agreed

    def agreed(self, step):
        if step == 7:
            signal.raise_signal(signal.SIGTERM)
        return seen(self, step)

    monkeypatch.setattr(StopRequest, "agreed", agreed)
    with pytest.raises(SystemExit) as ended:
        tune(data, tmp_path / "run")
    assert ended.value.code == 75 and "after step 7, which is saved" in capsys.readouterr().out
    shutil.copytree(tmp_path / "run", tmp_path / "begun")
    monkeypatch.undo()
    tune(data, tmp_path / "run")
    assert "steps 8 to 30" in capsys.readouterr().out
    assert metrics(tmp_path / "run") == metrics(tuned)
    for name in ("model/model.safetensors", "model_ema/model.safetensors"):
        assert (tmp_path / "run" / name).read_bytes() == (tuned / name).read_bytes()

    # Two ranks go on from there as well, and one alone finds the accuracy that they found together.
    arguments = ["--data", data / "train", "--eval-data", data / "val", "--output", tmp_path / "begun"]
    assert "on 2 x cpu" in run_program("finetune.py", *TINY, *arguments, ranks=2).stdout
    together = metrics(tmp_path / "begun")[-1]
    assert (together["step"], together["eval_images"], together["left_out"]) == (30, 27, 1)
    with pytest.raises(SystemExit, match="2"):  # the folder is that of another run
        tune(data, tmp_path / "begun", "--lr", "2e-3")
    tune(data, tmp_path / "begun")
    assert metrics(tmp_path / "begun")[-1] == together


def test_evaluation_has_all_classes(data, tmp_path, capsys):
    shutil.copytree(data, tmp_path / "data")
    shutil.rmtree(tmp_path / "data" / "val" / "plain")
    with pytest.raises(SystemExit, match="2"):
        tune(tmp_path / "data", tmp_path / "run")
    said = capsys.readouterr().err
    assert "lacks 1 of the 3 classes of " in said and said.count("\n") == 1
    assert not (tmp_path / "run" / "config.json").exists()


def test_an_encoder_is_taken_whole_or_not_at_all(data, tuned, tmp_path, capsys, monkeypatch):
    arguments = ["--encoder", str(tmp_path / "model")]
    without = [word for option in ("--depth", "--patch-size", "--image-size", "--model") for word in (option,)]
    kept = [w for i, w in enumerate(TINY) if w not in without and (i == 0 or TINY[i - 1] not in without)]
    more = [*kept, *arguments, "--data", str(data / "train"), "--eval-data", str(data / "val")]
    state = load_file(tuned / "model/model.safetensors")
    shutil.copytree(tuned / "model", tmp_path / "model")
    config = finetune.parse(more)
    vit, description = new_model(config, 3)
    head = {"head.weight", "head.bias"}
    for name, tensor in vit.state_dict().items():
        assert torch.equal(tensor, state[name]) != (name in head)
    assert description["arguments"]["depth"] == 1 and all(p.requires_grad for p in vit.parameters())
    begun = [*more, "--output", str(tmp_path / "begun"), "--max-steps"]
    finetune.main([*begun, "1"])
    (tmp_path / "model").rename(tmp_path / "gone")
    finetune.main([*begun, "2"])
    assert "; steps 2 to 2\n" in capsys.readouterr().out
    (tmp_path / "gone").rename(tmp_path / "model")
    del state["blocks.0.mlp.fc1.weight"]
    save_file(state, tmp_path / "model/model.safetensors")
    with pytest.raises(SystemExit, match="2"):
        finetune.main([*more, "--output", str(tmp_path / "run")])
    assert "1 missing: blocks.0.mlp.fc1.weight" in capsys.readouterr().err
    wide = create_plain("vit_tiny_patch16_224", {"img_size": (16, 32), "num_classes": 0, "depth": 1})
    monkeypatch.setattr(finetune, "new_model", lambda *_: (wide, description))
    for probe in ([], ["--probe", "knn"]):
        with pytest.raises(SystemExit, match="2"):
            finetune.main([*more, *probe, "--output", str(tmp_path / "run")])
        assert "takes images of 16 x 32 pixels; expected square ones" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["linear", "knn"])
def test_probes_leave_the_encoder_as_it_is(data, tuned, tmp_path, capsys, monkeypatch, kind):
    """The network that has learned the three classes, frozen, tells them apart."""
    seen = []
    made = finetune.new_model
    monkeypatch.setattr(finetune, "new_model", lambda *how: seen.append(made(*how)) or seen[-1])
    arguments = ["--data", str(data / "train"), "--eval-data", str(data / "val"), "--device", "cpu", "--threads", "1"]
    finetune.main([*arguments, "--encoder", str(tuned), "--probe", kind, "--output", str(tmp_path)])
    said = capsys.readouterr().out
    record = json.loads((tmp_path / "probes.jsonl").read_text())
    error = math.sqrt(record["top1"] * (100 - record["top1"]) / 27)
    assert said.count("\n") == 1 and f"top1 {record['top1']:.2f} +- {error:.2f} % of 27" in said and "cut.jpg" in said
    assert (record["eval_images"], record["train_images"], record["left_out"]) == (27, 60, 1)
    assert record["top1"] > 80
    state = load_file(tuned / "model/model.safetensors")
    for name, tensor in seen[0][0].state_dict().items():
        assert torch.equal(tensor, state[name])
    assert not (tmp_path / "config.json").exists()


def test_a_probe_that_goes_on_is_not_taken_for_one_that_has_died(data, tuned, tmp_path, monkeypatch):
    """Two on the same images, with the same folder for their results."""
    arguments = ["--encoder", tuned, "--data", data / "train", "--eval-data", data / "val", "--output", tmp_path]
    arguments = [*map(str, arguments), "--device", "cpu", "--threads", "1", "--probe", "knn"]
    others = []

    def measured(vit, index, evaluation, *, record, **how):
        with inflight.Record(record, evaluation.fingerprint) as held:
            held.note(np.arange(4))
            others.append(run_program("finetune.py", *arguments).stdout)
        return {"top1": 50.0, "train_images": 1, "eval_images": 1, "left_out": {}}

    monkeypatch.setitem(finetune.PROBES, "knn", measured)
    finetune.main(arguments)
    assert "knn probe of" in others[0] and "ended without a word" not in others[0]
    assert not list((tmp_path / "inflight").iterdir()) and (tmp_path / "probes.jsonl").read_text().count("\n") == 2


@pytest.mark.gpu
def test_learns_on_a_gpu(data, tmp_path):
    pytest.importorskip("tyro")
    pytest.importorskip("nvidia.dali")
    tune(data, tmp_path / "run", "--device", "cuda", "--operations", "2")
    assert [line for line in metrics(tmp_path / "run") if "top1" in line][-1]["top1"] > 80
    tune(data, tmp_path / "probe", "--device", "cuda", "--probe", "linear")
