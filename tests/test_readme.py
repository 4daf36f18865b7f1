"""README and docs/ against the code: a newcomer runs their commands from top to bottom; files and links are there.

Each command is run with words of this test in place of its names of folders, and in small. ``make`` and ``pip`` are
what CI begins with; what only a cluster has is read by the programs' parsers and not run.
"""

import json
import re
import shlex
from importlib import import_module
from itertools import chain, pairwise
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
from conftest import ROOT, SMALL, run_program

import detect
import embed
import finetune
import train
from bench.__main__ import SUBJECTS
from embed import EmbedConfig
from run.command import _Own
from run.recipes import RECIPES
from transfer.detection.recipes import RECIPES as DETECTION_RECIPES
from transfer.detection.scenes import make_scenes
from transfer.recipes import TUNE_RECIPES

PAGES = {path: path.read_text() for path in (ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")))}
TEXT = "\n".join(PAGES.values())
BLOCKS = [block.replace("\\\n", " ") for block in re.findall(r"```bash\n(.*?)```", TEXT, re.S)]
PROGRAMS = {"train.py": train, "finetune.py": finetune, "detect.py": detect, "embed.py": embed}
TUNE = (
    "--device", "cpu", "--precision", "float32", "--threads", "1", "--batch-size", "12", "--epochs", "1",
    "--warmup-epochs", "0.5",
)  # fmt: skip
IN_SMALL = {  # what is added to a command
    "train.py": (*SMALL, "--patch-size", "8", "--model", "vit_tiny_patch16_224", "--max-steps", "4"),
    "finetune.py": (*TUNE, "--image-size", "32", "--max-steps", "2", "--operations", "1"),
    "embed.py": ("--device", "cpu", "--threads", "1"),
    "detect.py": (
        "--device", "cpu", "--image-size", "64", "--window", "2", "--width", "8", "--batch-size", "4", "--proposals",
        "16", "--workers", "0", "--max-steps", "1", "--warmup-steps", "2",
    ),
}  # fmt: skip


def words_of(line):
    return shlex.split(line.replace("[", "").replace("]", "").replace("...", ""), comments=True)


def commands(lines):
    """(program, or module behind -m; its arguments; number of ranks) of lines that are commands of this project."""
    for line in lines:
        words = words_of(line)
        names = [word for word in words if word in PROGRAMS] or [b for a, b in pairwise(words) if a == "-m"]
        if names and any(word.endswith(("python", "torchrun")) for word in words):
            yield names[0], words[words.index(names[0]) + 1 :], 2 if any("torchrun" in word for word in words) else 1


@pytest.fixture(scope="module")
def places(photos, undisturbed, tmp_path_factory):
    """{word of the pages: what stands for it}."""
    folder = tmp_path_factory.mktemp("newcomer")
    found = {name: photos for name in ("IMAGES", "TRAIN", "VAL", "FOLDER")}
    names = "RUN", "TUNED", "SCRATCH", "DETECTOR", "FURTHER", "sheet.png", "features.npy"
    found |= {name: folder / name for name in names}
    found["OTHER_RUN"], _ = undisturbed
    return {name: str(path) for name, path in found.items()} | {"IMAGE": str(photos / "a/00.jpg")}


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # of pycocotools
def test_a_newcomer_runs_every_command(places, tmp_path_factory, monkeypatch, capsys):
    """In their order, as each needs what the ones before it have left; in the end the encoder is loaded by timm."""
    for package in ("matplotlib", "pycocotools"):
        pytest.importorskip(package)
    drawn = make_scenes(tmp_path_factory.mktemp("scenes") / "data", train=8, evaluation=4)
    scenes = dict(zip(("train.json", "TRAIN", "val.json", "VAL"), map(str, chain(*drawn.values())), strict=True))
    monkeypatch.chdir(tmp_path_factory.mktemp("cwd"))
    lines = [line for block in BLOCKS if "#SBATCH" not in block for line in block.splitlines()]
    done = set()
    for name, arguments, ranks in commands(lines):
        here = places | scenes if name == "detect.py" else places
        given = [here.get(word, word) for word in arguments] + list(IN_SMALL.get(name, ()))
        if name == "run.preview" and "--data" not in given:  # the generated images take a while
            given += ["--data", places["IMAGES"]]
        if ranks > 1:  # to a folder of its own, as this process keeps that of the first command
            run_program(name, *given, "--max-steps", 2, "--output", f"{places['RUN']}-ranks", ranks=ranks)
        elif words := [word for word in ("--help", "--dry-run") if word in given]:
            with pytest.raises(SystemExit) as ended:
                PROGRAMS[name].main(given)
            said = {"--help": "--knn-every", "--dry-run": "images: "}[words[0]]
            assert not ended.value.code and said in capsys.readouterr().out
        elif name in PROGRAMS:
            PROGRAMS[name].main(given)
        else:
            module = "bench.__main__" if name == "bench" else name
            assert not import_module(module).main(given), given
        done.add(name)
    assert done >= {*PROGRAMS, "run.preview", "bench"}
    snippet = re.search(r"```python\n(.*?)```", TEXT, re.S)[1].replace("RUN", places["RUN"])
    loaded = {}
    exec(snippet.replace("IMAGE", places["IMAGE"]), loaded)
    rows, names = np.load(places["features.npy"]), Path(places["features.npy"]).with_suffix(".jsonl").read_text()
    row = [json.loads(line)["path"] for line in names.splitlines()].index("a/00.jpg")
    assert loaded["features"].shape == (1, 192) and len(rows) == 48
    assert F.cosine_similarity(loaded["features"], torch.from_numpy(rows[row])[None]) > 0.99


def test_other_commands_are_understood():
    """Those of clusters, by the parser; the benchmarks by name: ``bench/device.sh`` runs them."""
    for name, arguments, _ in commands(line for block in BLOCKS if "#SBATCH" in block for line in block.splitlines()):
        PROGRAMS[name].parse([word for word in arguments if word != "&"])
    subjects = re.findall(r"python -m bench (\w+)", TEXT)
    assert subjects and set(subjects) <= {*SUBJECTS, "SUBJECT"}
    makefile = (ROOT / "Makefile").read_text().replace("\\\n", " ").replace("$(BIN)", ".venv/bin")
    asked = [(name, words) for name, words, _ in commands(makefile.splitlines()) if name in (*PROGRAMS, "bench")]
    assert [name for name, _ in asked] == ["train.py", "bench", "train.py", "finetune.py"]
    for name, words in asked:  # those of the demo, and those that it names as the next
        assert words[0] in SUBJECTS if name == "bench" else PROGRAMS[name].parse(words)
    targets = re.findall(r"\bmake (\w+)`", TEXT) + re.findall(r"^make (\w+)", "\n".join(BLOCKS), re.M)
    assert len(targets) > 1 and all(re.search(rf"^{target}:", makefile, re.M) for target in targets)


FOREIGN = {  # options of torchrun, hf, pip and TensorBoard
    "--standalone", "--max-restarts", "--shutdown-timeout", "--numa-binding", "--repo-type", "--local-dir",
    "--index-url", "--logdir",
}  # fmt: skip


def test_what_stands_between_backticks_is_there():
    """Files of this repository, what is said to be defined in them, modules, and options of whatever program."""
    sources = "\n".join(path.read_text() for name in ("bench", "pipeline", "run") for path in ROOT.glob(f"{name}/*.py"))
    sources += (ROOT / "tests/pipeline/fuzz.py").read_text()
    known = FOREIGN | set(re.findall(r'"(--[a-z-]+)"', sources))
    for parsed in (*RECIPES.values(), *TUNE_RECIPES.values(), *DETECTION_RECIPES.values(), EmbedConfig(), _Own()):
        known |= {f"--{name.replace('_', '-')}" for name in vars(parsed)}
    known |= {option.replace("--", "--no-", 1) for option in known}
    for page, text in PAGES.items():
        quoted = re.findall(r"(?<!`)`([^`]+)`(?!`)", re.sub(r"```.*?```", "", text, flags=re.S))
        assert quoted
        for word in quoted:
            if re.fullmatch(r"[\w./]+\.(py|sh|cfg)", word) and page.name != "files.md":  # which has a test of its own
                assert (ROOT / word).is_file(), f"{page.name}: {word}"
            options = set(re.findall(r"(?<!\S)--[a-z-]+", word))
            assert options <= known, f"{page.name}: {options - known}"
        for module in re.findall(r"python -m ([\w.]+)", text):
            place = ROOT / module.replace(".", "/")
            assert place.is_dir() or place.with_suffix(".py").is_file(), f"{page.name}: {module}"
        for name, file in re.findall(r"`(\w+)`\s+of\s+`([\w/]+\.py)`", text):
            assert re.search(rf"^(def|class) {name}\b", (ROOT / file).read_text(), re.M), f"{page.name}: {name}"


def anchors(text):
    """Those that GitHub gives the headings of a page: small letters, digits, hyphens for spaces."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", text, flags=re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_lead_somewhere():
    """To files and headings of the project; every page of docs/ is reached from README."""
    reached = set()
    for page, text in PAGES.items():
        for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", text):
            name, _, anchor = target.partition("#")
            file = (page.parent / name).resolve() if name else page
            assert file.exists(), f"{page.name}: {target}"
            assert not anchor or anchor in anchors(PAGES[file]), f"{page.name}: {target}"
            if page.name == "README.md":
                reached.add(file)
    assert reached >= PAGES.keys() - {ROOT / "README.md"}
    assert len(PAGES[ROOT / "README.md"].split()) <= 2500, "README is for a first reading; the rest goes to docs/"
    names = re.findall(r'create_model\("(\w+)", pretrained', TEXT)
    assert names and all(timm.list_pretrained(f"{name}.*") for name in names)


def test_the_packages_for_cuda_12_are_those_for_cuda_13():
    required = re.search(r"install_requires =\n((?:    .*\n)+)", (ROOT / "setup.cfg").read_text())[1].split()
    given = " ".join(re.findall(r"pip install ('.*)", PAGES[ROOT / "docs/install.md"]))
    given = re.sub(r",<\S+|torchvision|--index-url \S+|'", "", given).replace("cuda120", "cuda130")
    assert sorted(given.split()) == sorted(required)


def test_the_file_map_is_complete():
    """Each folder of the product has a section with a row for each of its modules, and no other."""
    sections = dict(re.findall(r"^## `?(.*?)`?\n(.*?)(?=^## |\Z)", PAGES[ROOT / "docs/files.md"], re.M | re.S))
    folders = {f"{name}/": ROOT / name for name in ("kernels", "pipeline", "model", "run", "transfer")}
    folders |= {"transfer/detection/": ROOT / "transfer/detection", "The programs": ROOT}
    for name, folder in folders.items():
        there = {path.name for path in folder.glob("*.py")} - {"__init__.py"}
        assert set(re.findall(r"^\| `(\w+\.py)` \|", sections[name], re.M)) == there, name
    assert all((ROOT / "bench" / name).exists() for name in re.findall(r"`(\w+\.\w+)`", sections["bench/"]))
