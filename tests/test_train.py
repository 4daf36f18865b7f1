"""The whole program, as a user calls it: on a CPU, on small images, with a small model."""

import importlib.util
import json
import re
import shutil
import time

import pytest
import timm
import torch
from conftest import MORE, SMALL, metrics, photo, run_program, start_program, train
from safetensors.torch import load_file

from pipeline.walk import walk
from run.signals import StopRequest
from train import main
from transfer.pretrained import load_encoder


def test_run_leaves_what_the_readme_promises(undisturbed):
    output, said = undisturbed
    names = {path.name for path in output.iterdir()}
    assert names >= {"config.json", "metrics.jsonl", "checkpoints", "rejected.jsonl", "encoder"}
    assert "encoder.partial" not in names
    assert ("curves.png" in names) == (importlib.util.find_spec("matplotlib") is not None), said
    assert not walk(str(output.parent), str).names, "a folder of images passes over what it holds of a run"
    logged = [line for line in metrics(output) if "loss" in line]
    assert [line["step"] for line in logged] == [1, *range(3, 33, 3), 32]
    assert said.count("loss ") == len(logged)
    assert len(list((output / "checkpoints").iterdir())) == 3
    description = json.loads((output / "encoder/config.json").read_text())
    training = description["training"]
    share = training["knn_trained"] / 100
    error = 100 * (share * (1 - share) / 48) ** 0.5
    assert training["knn_queries"] == 48
    assert f"k-NN accuracy on 48 of 48 images, 48 as the bank: {100 * share:.1f} +- {error:.1f} % trained" in said
    vit = timm.create_model(f"local-dir:{output / 'encoder'}", pretrained=True)
    assert vit(torch.randn(1, 3, 32, 32)).shape == (1, 192)


def test_killed_and_continued_gives_the_same_bytes(undisturbed, photos, tmp_path):
    """kill -9 after a checkpoint, the first of which lies within a batch (step 5), then the same command again."""
    output = tmp_path / "killed"
    arguments = ["train.py", *SMALL, "--data", photos, "--output", output, "--eval-data", photos, *MORE]
    running = start_program(tmp_path / "said", *arguments)
    deadline = time.monotonic() + 120
    while not list((output / "checkpoints").glob("*.pt")) and time.monotonic() < deadline:
        time.sleep(0.01)
    running.kill()
    running.join()
    steps = [int(re.search(r"\d+", path.name).group()) for path in (output / "checkpoints").glob("*.pt")]
    assert steps and max(steps) < 32, "the run was over before it could be killed"
    said = run_program(*arguments).stdout
    assert f"steps {max(steps) + 1} to 32" in said and "none ends a decoder" in said
    assert metrics(output) == metrics(undisturbed[0])
    assert (output / "encoder/model.safetensors").read_bytes() == (
        undisturbed[0] / "encoder/model.safetensors"
    ).read_bytes()


def test_two_ranks_train_as_one_process(photos, tmp_path):
    more = "--ema", "0.9", "--clip", "norm"
    for ranks in (1, 2):
        train(photos, tmp_path / str(ranks), "--max-steps", "9", "--lr", "1e-4", *more, ranks=ranks)
    one, two = metrics(tmp_path / "1"), metrics(tmp_path / "2")
    assert [line["step"] for line in one] == [line["step"] for line in two] == [1, 3, 6, 9]
    for a, b in zip(one, two, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-3)
        assert a["similarity"] == pytest.approx(b["similarity"], abs=1e-3)
    weights = [load_file(tmp_path / str(ranks) / "encoder/model.safetensors") for ranks in (1, 2)]
    # A shift of all features, which batch norm takes out, and of all keys, which softmax does, has a gradient of
    # rounding alone, of which AdamW makes steps as of any other.
    free = {"norm.bias": 9e-4, "blocks.0.attn.qkv.bias": 9e-4}
    for name, tensor in weights[0].items():
        torch.testing.assert_close(tensor, weights[1][name], rtol=0, atol=free.get(name, 1e-6))


def test_bfloat16_trains_as_float32_does(undisturbed, photos, tmp_path, capsys):
    """From images to the encoder, as on a GPU: the same losses, but for rounding, and other weights than in float32."""
    output = tmp_path / "run"
    more = "--precision", "bfloat16", *MORE, "--max-steps", "9"
    assert "in bfloat16" in in_process(capsys, photos, output, *more)
    losses, exact = ([line["loss"] for line in metrics(run) if "loss" in line] for run in (output, undisturbed[0]))
    assert losses[0] == pytest.approx(exact[0], rel=0.02) and losses[0] != exact[0]
    assert losses == pytest.approx(exact[:4], rel=0.1)  # a rate that is a thousandth higher changes the third by 3 %
    weights = load_file(output / "encoder/model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
    assert all(tensor.isfinite().all() for tensor in weights.values())


def in_process(capsys, data, output, *more):
    """What ``train`` prints, without a process of its own."""
    main([*SMALL, "--data", str(data), "--output", str(output), *map(str, more)])
    return capsys.readouterr().out


def test_a_run_from_an_encoder_goes_on_without_it(undisturbed, photos, tmp_path, capsys, monkeypatch):
    """Stopped within an epoch, and the encoder removed, the same command ends in the same bytes; what it has learned is
    beside what it began with."""
    source = shutil.copytree(undisturbed[0] / "encoder", tmp_path / "mine")
    more = "--encoder", source, "--eval-data", photos, "--max-steps", "8", "--ema", "0.9", "--knn-images", "96"
    said = in_process(capsys, photos, tmp_path / "whole", *more)
    scores = metrics(tmp_path / "whole")[-1]
    assert f"% trained, {scores['knn_start']:.1f} +- " in said and f"of {source}" in said
    begun, (_, description) = json.loads((tmp_path / "whole/start.json").read_text()), load_encoder(tmp_path / "whole")
    training = description.pop("training")
    assert training.items() >= {"knn_start": scores["knn_start"], "encoder": begun.pop("training")}.items()
    assert description == begun
    kept = load_file(tmp_path / "whole/start.safetensors")
    assert all(torch.equal(tensor, kept[name]) for name, tensor in load_file(source / "model.safetensors").items())

    seen = StopRequest.agreed
    monkeypatch.setattr(StopRequest, "agreed", lambda self, step: step == 5 or seen(self, step))
    with pytest.raises(SystemExit, match="75"):
        in_process(capsys, photos, tmp_path / "run", *more)
    monkeypatch.undo()
    shutil.rmtree(source)
    assert "steps 6 to 8" in in_process(capsys, photos, tmp_path / "run", *more)
    assert metrics(tmp_path / "run") == metrics(tmp_path / "whole")
    for name in ("encoder/model.safetensors", "start.safetensors"):
        assert (tmp_path / "run" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    with pytest.raises(SystemExit, match="2"):
        in_process(capsys, photos, tmp_path / "other", *more)
    assert f"{source} does not exist; expected a run" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--data", "nowhere"), "nowhere"),
        (("--data", "{photos}", "--batch-size", "64"), "or --batch-size 48 and, in proportion, --lr 0.00075"),
        (("--data", "{other}"), "less than one batch of 12; expected more of them\n"),
        (("--data", "{photos}/a", "--eval-data", "{other}"), "a has no labels; expected"),
        (("--data", "{photos}", "--model", "resnet18"), "--model resnet18"),
        (("--data", "{photos}", "--lr", "-1"), "--lr -1.0: expected 0 or more"),
        (("--data", "{photos}", "--image-size", "1024"), "at most 8192"),
        (("--data", "{photos}", "--output", "{photos}/a/00.jpg"), "is a file; expected a folder"),
    ],
    ids=lambda value: value[-1] if isinstance(value, tuple) else "",
)
def test_wrong_configurations_stop_before_any_work(photos, tmp_path, capsys, arguments, said):
    (tmp_path / "other" / "zebra").mkdir(parents=True)
    photo(0).save(tmp_path / "other" / "zebra" / "0.jpg")
    arguments = [argument.format(photos=photos, other=tmp_path / "other") for argument in arguments]
    with pytest.raises(SystemExit) as ended:
        main([*SMALL, "--output", str(tmp_path / "run"), *arguments])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "run" / "config.json").exists()


def test_evaluation_without_a_usable_image_costs_no_encoder(photos, tmp_path, capsys):
    (tmp_path / "eval" / "a").mkdir(parents=True)
    cut = (photos / "a" / "00.jpg").read_bytes()[:-200]
    (tmp_path / "eval" / "a" / "cut.jpg").write_bytes(cut)
    more = "--max-steps", "4", "--window", "1000000000"  # of which an epoch has 4
    said = in_process(capsys, photos, tmp_path / "run", "--eval-data", tmp_path / "eval", *more)
    assert "no k-NN accuracy: no image in " in said
    assert (tmp_path / "run" / "encoder/model.safetensors").exists()


def test_a_dry_run_leaves_nothing_behind(undisturbed, photos, tmp_path):
    """On two ranks, of a run to begin and of one to continue; what it says of steps and the checkpoint holds."""
    kept = tmp_path / "kept"
    shutil.copytree(undisturbed[0], kept)
    newest = max((kept / "checkpoints").iterdir())
    size = newest.stat().st_size
    newest.unlink()
    before = {path: (path.stat().st_mtime_ns, path.is_file() and path.read_bytes()) for path in kept.rglob("*")}
    for output, steps in ((tmp_path / "new", "1 to 32"), (kept, "31 to 32")):
        said = train(photos, output, *MORE, "--eval-data", photos, "--dry-run", ranks=2).stdout
        assert f"to come: steps {steps}, epoch" in said and "images: 48; nothing is left out" in said
        assert ("would go on from step 30" in said) == (output == kept)
        assert float(re.search(r"memory: at most ([\d.]+) GB", said)[1]) > 0.1
        assert 1e6 * float(re.search(r"disk: ([\d.]+) MB", said)[1]) == pytest.approx(size, rel=0.05)
    assert not (tmp_path / "new").exists()
    after = {path: (path.stat().st_mtime_ns, path.is_file() and path.read_bytes()) for path in kept.rglob("*")}
    assert after == before


@pytest.mark.gpu
def test_trains_on_a_gpu(photos, tmp_path):
    pytest.importorskip("tyro")
    pytest.importorskip("nvidia.dali")
    more = "--device", "cuda", "--precision", "bfloat16", "--max-steps", "16", *MORE
    said = train(photos, tmp_path / "run", *more).stdout
    assert "in bfloat16" in said and "JPEGs decoded by the GPU's" in said
    logged = metrics(tmp_path / "run")
    assert logged[-1]["step"] == 16 and all(0 < line["loss"] < 2 for line in logged)
