"""The whole program on generated scenes, as a user calls it: it learns, goes on where it was, refuses what is wrong."""

import importlib.util
import json
import shutil

import pytest
import torch
from conftest import run_program
from PIL import Image

import finetune
from detect import main, parse
from run import checkpoint
from run.progress import TooManySkipped
from run.ranks import Ranks
from transfer.detection.coco import CocoData
from transfer.detection.detector import load_detector
from transfer.detection.precision import evaluate
from transfer.detection.scenes import make_scenes
from transfer.detection.training import new_detector

pytest.importorskip("pycocotools")
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # of pycocotools

LEARNS = (
    "--recipe", "toy",
    "--device", "cpu", "--depth", "2", "--width", "32", "--batch-size", "2", "--epochs", "1.5", "--scale", "1", "1",
    "--warmup-steps", "20", "--checkpoint-every", "110", "--log-every", "40", "--image-size", "96", "--proposals", "32",
)  # fmt: skip
QUICK = (
    "--recipe", "toy",
    "--device", "cpu", "--depth", "1", "--width", "8", "--batch-size", "4", "--epochs", "1", "--image-size", "64",
    "--proposals", "16", "--checkpoint-every", "5", "--log-every", "3", "--drop-path", "0.2", "--warmup-steps", "2",
)  # fmt: skip


@pytest.fixture(scope="module")
def scenes(tmp_path_factory):
    """Options that name 160 scenes to train on, 32 to evaluate on, and the data itself."""
    places = make_scenes(tmp_path_factory.mktemp("scenes") / "data", train=160, evaluation=32)
    options = [
        word
        for split, (annotations, images) in places.items()
        for word in (f"--{split}-annotations", str(annotations), f"--{split}-images", str(images))
    ]
    return options, {split: CocoData(*place) for split, place in places.items()}


@pytest.fixture(scope="module")
def trained(scenes, tmp_path_factory):
    """A run of 120 steps from start to end."""
    output = tmp_path_factory.mktemp("runs") / "trained"
    main([*LEARNS, *scenes[0], "--output", str(output)])
    return output


def lines(output):
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def test_learns_to_find_and_outline(scenes, trained):
    """Measured with four seeds: AP50 of 14 to 22 % for boxes, from 3, and of 12 to 22 % for masks, from 0; AP of 3.5 to
    10 %."""
    options, data = scenes
    config = parse([*LEARNS, *options])
    untrained, _ = new_detector(config, 4)
    loaded, classes = load_detector(trained)
    how = {"size": config.image_size, "workers": 0, "ranks": Ranks.join("cpu")}
    (before, *_), (again, *_) = (evaluate(detector, data["eval"], **how) for detector in (untrained, loaded))
    logged = lines(trained)
    after = logged[-1]
    assert after["step"] == 120 and after["eval_images"] == 32
    for kind in ("box", "mask"):
        assert before[f"{kind}_AP50"] < 4
        assert after[f"{kind}_AP50"] > 10 and after[f"{kind}_AP"] > 2
    assert [line["step"] for line in logged[:-1]] == [1, 40, 80, 120]
    assert logged[3]["loss"] < 0.8 * logged[0]["loss"]
    found = json.loads((trained / "detections.json").read_text())
    assert {one["category_id"] for one in found} <= set(data["eval"].categories)
    assert classes == list(data["eval"].classes)
    assert {name: figure for name, figure in again.items() if figure is not None}.items() <= after.items()


def test_two_ranks_train_and_count_each_image_once(scenes, trained, tmp_path):
    """The last ten steps once more, on two ranks; they sample other regions than one."""
    output = tmp_path / "ranks"
    shutil.copytree(trained, output)
    newest, _ = checkpoint.newest(output / "checkpoints")
    newest.unlink()
    said = run_program("detect.py", *LEARNS, *scenes[0], "--output", output, ranks=2).stdout
    assert "steps 111 to 120" in said and "average precision on 32 images" in said
    one, two = lines(trained), lines(output)
    assert [line["step"] for line in two] == [line["step"] for line in one]
    assert two[-2]["loss"] == pytest.approx(one[-2]["loss"], rel=0.1)
    for name in ("box_AP50", "mask_AP50"):
        assert two[-1][name] == pytest.approx(one[-1][name], abs=10)
    found = [json.dumps(result) for result in json.loads((output / "detections.json").read_text())]
    assert len(found) == len(set(found))


def test_goes_on_where_it_was_bit_for_bit(scenes, undisturbed, tmp_path, capsys):
    """Stopped after step 7, and again by a checkpoint that is damaged; from the step 5 that is left it goes on, also
    where the encoder is gone that it began with."""
    encoder, whole, parts = (tmp_path / name for name in ("encoder", "whole", "parts"))
    shutil.copytree(undisturbed[0] / "encoder", encoder)
    options = [*scenes[0], "--encoder", str(encoder), "--depth", "0"]
    main([*QUICK, *options, "--output", str(whole), "--max-steps", "12"])
    main([*QUICK, *options, "--output", str(parts), "--max-steps", "7"])
    newest, _ = checkpoint.newest(parts / "checkpoints")
    newest.write_bytes(newest.read_bytes()[:-100])
    shutil.rmtree(encoder)
    capsys.readouterr()
    main([*QUICK, *options, "--output", str(parts), "--max-steps", "12", "--workers", "1"])
    said = capsys.readouterr().out
    assert "is damaged" in said and "steps 6 to 12" in said
    states = [checkpoint.load(checkpoint.newest(path / "checkpoints")[0]) for path in (whole, parts)]
    assert states[0]["step"] == states[1]["step"] == 12
    for name, tensor in states[0]["detector"].items():
        assert torch.equal(tensor, states[1]["detector"][name]), name
    clocked = ("images_per_second", "data_wait")
    a, b = ([{k: v for k, v in line.items() if k not in clocked} for line in lines(path)] for path in (whole, parts))
    assert a == b and [line["step"] for line in a] == [1, 3, 6, 9, 12, 12]

    for more, why in ((("--lr", "0.5"), "lr 0.0005 there and 0.5 now"), (("--seed", "1"), "seed 0 there")):
        with pytest.raises(SystemExit) as ended:
            main([*QUICK, *options, "--output", str(whole), *more])
        assert ended.value.code == 2 and why in capsys.readouterr().err


@pytest.fixture
def few(tmp_path):
    """Options that name 12 scenes to train on, 2 to evaluate on; and the folder with the images of both."""
    root = tmp_path / "few"
    make_scenes(root, train=12, evaluation=2)
    options = [(f"--{split}-annotations", f"{root / split}.json") for split in ("train", "eval")]
    options += [(f"--{split}-images", str(root / split)) for split in ("train", "eval")]
    return [*QUICK, *(word for pair in options for word in pair)], root


def test_bad_images_are_named_and_trained_around(few, tmp_path, capsys):
    options, root = few
    Image.new("RGB", (50, 40)).save(root / "train" / "00003.jpg")
    (root / "train" / "00005.jpg").write_bytes(b"no image")
    for split in ("train", "eval"):  # what its header does not tell
        cut = root / split / "00001.jpg"
        cut.write_bytes(cut.read_bytes()[:-300])
    with pytest.raises(SystemExit) as ended:
        main([*options, "--output", str(tmp_path / "run"), "--max-bad", "0"])
    said = capsys.readouterr().err
    assert ended.value.code == 2 and "2 of 12 files cannot be used, at most 0 may (--max-bad 0.0)" in said
    for steps, gone in (("3", []), ("4", ["00007.jpg"])):  # 3 are an epoch
        for name in gone:
            (root / "train" / name).unlink()
        main([*options, "--output", str(tmp_path / "run"), "--epochs", "2", "--max-steps", steps])
        said = capsys.readouterr().out
        assert f"left out {3 + len(gone)} of 12 files" in said
        assert "1 image cannot be read, so nothing is found there: " in said
        rejected = [json.loads(line) for line in (tmp_path / "run" / "rejected.jsonl").read_text().splitlines()]
        assert [line["path"] for line in rejected] == ["00001.jpg", "00003.jpg", "00005.jpg", *gone]
        assert "truncated" in rejected[0]["reason"] and rejected[2]["reason"] == "not an image"
        assert rejected[1]["reason"].startswith("is 50 pixels wide and 40 high, not ")
    assert lines(tmp_path / "run")[-1]["eval_unread"] == 1


def test_gradients_that_are_never_finite_stop_the_run(few, tmp_path):
    more = "--epochs", "9", "--lr", "1e38", "--log-every", "9", "--warmup-steps", "0"
    with pytest.raises(TooManySkipped, match=r"steps in a row until step \d+ had no finite gradient; .*skipped\.json"):
        main([*few[0], *more, "--output", str(tmp_path / "run")])
    dumped = json.loads((tmp_path / "run" / "skipped.json").read_text())
    assert all((few[1] / "train" / path).exists() for batch in dumped["batches"] for path in batch["images"])
    assert [len(batch["images"]) for batch in dumped["batches"]] == [4] * 9


def test_folders_of_other_programs_and_other_data_are_refused(undisturbed, photos, scenes, trained, capsys):
    options, found = scenes
    other = "--train-annotations", str(found["eval"].annotations), "--train-images", str(found["eval"].root)
    data = "--data", str(photos), "--eval-data", str(photos), "--batch-size", "8"
    for program, arguments, said in (
        (main, [*QUICK, *options, "--output", str(undisturbed[0])], f"{undisturbed[0]} holds a run of train.py"),
        (finetune.main, [*data, "--output", str(trained)], f"{trained} holds a run of detect.py; expected another"),
        (main, [*LEARNS, *other, "--output", str(trained)], "holds a run on other annotations than"),
        (main, [*LEARNS, *other, "--output", str(trained), "--resume", "never"], "--resume never"),
    ):
        with pytest.raises(SystemExit) as ended:
            program(["--recipe", "toy", "--device", "cpu", *arguments])
        error = capsys.readouterr().err
        assert ended.value.code == 2 and said in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--train-annotations", "{train}"), "--train-images"),
        (("--eval-annotations", "{train}", "--eval-images", "."), "expected both or neither"),
        (("--train-annotations", "{train}", "--train-images", "."), "160 of 160 files cannot be used"),
        (("--train-annotations", "gone.json", "--train-images", "."), "gone.json"),
        (("--image-size", "100"), "--image-size 100: expected a multiple of 32"),
        (("--window", "5"), "--window 5 does not divide the 8 x 8 patches"),
        (("--encoder", "x"), "--depth 1: expected no such option beside --encoder, which has its own"),
        (("--encoder", "nowhere", "--depth", "0"), "nowhere does not exist"),
        (("--model", "resnet18"), "--model resnet18"),
        (("--batch-size", "1000"), "less than one batch of 1,000; expected more of them, or --batch-size 160 and, in"),
        (("--eval-images", "{images}"), "of 32 files cannot be used, at most 20 may"),
        (("--scale", "2", "1"), "--scale"),
        (("--lr", "nan"), "--lr nan: expected 0 or more"),
        (("--warmup-steps", "40"), "--warmup-steps 40: expected less than the 40 steps of --epochs 1"),
        (("--output", "{train}"), "is a file; expected a folder"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_wrong_configurations_stop_before_any_work(scenes, tmp_path, capsys, arguments, said):
    options, data = scenes
    places = {"train": data["train"].annotations, "images": data["train"].root}
    given = [argument.format(**places) for argument in arguments]
    if "annotations" not in given[0]:
        given = [*options, *given]
    with pytest.raises(SystemExit) as ended:
        main([*QUICK, "--output", str(tmp_path / "run"), *given])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_says_what_to_install(monkeypatch, tmp_path, capsys):
    there = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "pycocotools" else there(name))
    with pytest.raises(SystemExit) as ended:
        main([*QUICK, "--output", str(tmp_path / "run")])
    assert ended.value.code == 2
    assert "pip install -e '.[coco]'" in capsys.readouterr().err


@pytest.mark.gpu
def test_trains_on_a_gpu(scenes, tmp_path):
    pytest.importorskip("tyro")
    main(
        [*QUICK, *scenes[0], "--output", str(tmp_path / "run"), "--device", "cuda", "--window", "2", "--max-steps", "8"]
    )
    logged = lines(tmp_path / "run")
    assert logged[-1]["eval_images"] == 32 and all(0 < line["loss"] < 10 for line in logged[:-1])
