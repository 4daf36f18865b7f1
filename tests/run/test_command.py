"""The command line: recipes, files of options, help, and what is answered before anything is imported."""

import dataclasses
import json
from collections import Counter
from pathlib import Path

import pytest
from conftest import run_program

from embed import EmbedConfig
from run import command
from run.recipes import RECIPES, Config
from transfer.detection.recipes import DetectionConfig
from transfer.recipes import TUNE_RECIPES, TuneConfig


def parse(*words, recipes=RECIPES):
    own_data = (lambda config: config.data is not None) if isinstance(recipes, dict) else None
    return command.parse("a.py", recipes, list(words), own_data=own_data)


def test_a_recipe_wherever_it_stands_gives_the_defaults(capsys):
    """A shortened option is not taken for it, and help is that of the recipe."""
    small = RECIPES["cifar-vit-s"]
    for words, expected in (
        ((), RECIPES["toy"]), (("--lr", "2"), dataclasses.replace(RECIPES["toy"], lr=2.0)),
        (("--recipe", "cifar-vit-s"), small),
        (("--lr", "2", "--recipe=cifar-vit-s", "--grey-p", "1"), dataclasses.replace(
            small, lr=2.0, augmentation=dataclasses.replace(small.augmentation, grey_p=1.0)
        )),
    ):  # fmt: skip
        assert parse(*words) == expected
    for words in (("--lr", ""), ("--lr=",), ("", "--lr", "2")):  # "$RATE", where it is not set
        with pytest.raises(ValueError, match=r"^(--lr=?|a\.py): nothing stands behind it"):
            parse(*words)
    for words, said in (
        (("--recipe", "none"), "expected one of toy"), (("--data", "."), "--recipe is missing"),
        (("--data", *"abcde", "--lr", "2"), "^--data: too many values"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=said):
            parse(*words)
    with pytest.raises(SystemExit):
        parse("--rec", "cifar-vit-s")
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        parse("--recipe", "cifar-vit-s", "--help")
    said = capsys.readouterr().out
    assert not end.value.code and "1600" in said and not {"`", "None"} & set(said.split()) and "{None}" not in said
    assert max(map(len, said.splitlines())) <= 80


def test_a_file_of_options_goes_between_recipe_and_command_line(tmp_path):
    config = parse("--recipe", "imagenet-vit-b", "--data", "x", "--max-steps", "3", "--blur-p", "0", "0.5")
    written, toml = tmp_path / "config.json", tmp_path / "a.toml"
    written.write_text(json.dumps({"program": "train.py", "config": dataclasses.asdict(config)}, default=str))
    assert parse("--config", str(written)) == config
    changed = dataclasses.replace(config, epochs=30.0, data=Path("y"), ema=None)
    assert parse("--epochs", "30", "--config", str(written), "--data", "y", "--ema", "None") == changed
    toml.write_text(
        'recipe = "cifar-vit-t"\nbatch-size = 8\nepochs = 30\nbetas = [0.5, 1e-1]\n[augmentation]\nhue = 0\n'
    )
    small = RECIPES["cifar-vit-t"]
    few = {"batch_size": 8, "epochs": 30.0, "betas": (0.5, 0.1)}
    assert parse("--config", str(toml)) == dataclasses.replace(
        small, augmentation=dataclasses.replace(small.augmentation, hue=0.0), **few
    )


WRONG = [  # content of a file, and what is said of it
    ("recipe = ", "expected a .toml file"), ("rate = 3", "no option rate in train.py"),
    ('epochs = "3"', "epochs = '3'; expected float"), ("epochs = -1", "--epochs -1"),
    ("betas = [1]", r"betas = \[1\]; expected tuple\[float, float\]"), ("fsdp = 1", "fsdp = 1; expected bool"),
    ('precision = "half"', "precision = 'half'; expected .*float32"), ("seed = 1.5", "seed = 1.5; expected int"),
    ("[augmentation]\nhues = 1", "no option hues"), ('data = "."', "--recipe is missing"),
    ('data = ""', "data = '': nothing stands behind it"), ("recipe = [1]", r"--recipe \[1\]: expected one of toy"),
    ('program = "detect.py"', "is of detect.py; expected options of train.py"),
]  # fmt: skip


@pytest.mark.parametrize(("content", "said"), WRONG)
def test_what_is_wrong_in_a_file_of_options_is_one_line(tmp_path, content, said):
    file = tmp_path / "a.toml"
    file.write_text(content)
    with pytest.raises(ValueError, match=said) as error:
        parse("--config", str(file))
    assert "\n" not in str(error.value)


def test_files_and_folders_that_are_not_there(tmp_path):
    for file, said in ((tmp_path / "a.toml", "No such file"), (tmp_path, "Is a directory"), ("~nosuch/a.toml", "home")):
        with pytest.raises(ValueError, match=f"{'--config ' if '~' not in str(file) else ''}.*{said}"):
            parse("--config", str(file))
    with pytest.raises(ValueError, match=r"~nosuch.*; expected the name of a user"):
        parse("--output", "~nosuch/run")


def test_a_program_without_recipes(tmp_path, capsys):
    written = tmp_path / "a.toml"
    written.write_text('encoder = "x"\nthreads = 3\ndata = "y"')
    config = parse("--config", str(written), "--threads", "2", recipes=EmbedConfig(device="cpu"))
    assert config == EmbedConfig(encoder=Path("x"), data=Path("y"), threads=2, device="cpu")
    with pytest.raises(SystemExit):
        parse("--recipe", "toy", recipes=EmbedConfig())
    assert "--recipe" in capsys.readouterr().err


@pytest.mark.parametrize("kind", [Config, TuneConfig, DetectionConfig, EmbedConfig])
def test_every_option_stands_in_one_group_and_is_explained(kind):
    names = [field.name for field in dataclasses.fields(kind) if field.name != "augmentation"]
    assert Counter(name for group in kind.GROUPS.values() for name in group) == Counter(names)
    says = command.documented(kind)
    assert all(says[name] for name in names)
    if "augmentation" in {field.name for field in dataclasses.fields(kind)}:
        augmentation = type((TUNE_RECIPES | RECIPES)["toy"].augmentation)
        assert all(command.documented(augmentation).values())


def test_a_command_line_is_answered_before_anything_is_imported_that_takes_seconds():
    code = """
import runpy, signal, sys

class Watch:  # what Ctrl-C does when the first package of the project is imported
    @staticmethod
    def find_spec(name, *_):
        if name == "run":
            print("Ctrl-C:", signal.getsignal(signal.SIGINT).name)

sys.meta_path.insert(0, Watch)
for words in ("train --help", "finetune --rat 1", "detect --epochs 0", "embed --data x"):
    program, *words = words.split()
    sys.argv = [f"{program}.py", *words]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.modules.pop("run", None)
    try:
        runpy.run_path(f"{program}.py", run_name="__main__")
    except SystemExit as end:
        print(end.code)
print({"torch", "timm", "triton", "nvidia.dali"} & set(sys.modules))
"""
    done = run_program("-c", code, fresh=True)
    said = done.stdout.splitlines()
    assert said[0] == "Ctrl-C: SIG_DFL" and said[-7:] == [*["Ctrl-C: SIG_DFL", "2"] * 3, "set()"]
    assert "embed.py: --encoder is missing; expected a run" in done.stderr
    assert "detect.py: --epochs 0.0: expected more than 0" in done.stderr


def test_what_keeps_packages_from_being_loaded_is_one_line(tmp_path, monkeypatch, capsys):
    """The limit is of addresses, of which the libraries of torch take more than a gigabyte. With less than another
    package takes beside it, the error is one of any of these kinds."""
    monkeypatch.setattr("sys.argv", ["a.py"])
    for package, error in (("timm", MemoryError()), ("nvidia.dali", ImportError("lib")), ("timm", SystemError())):

        def fails(name, package=package, error=error):
            if name == package:
                raise error

        with monkeypatch.context() as patch, pytest.raises(SystemExit, match="2"):
            patch.setattr("importlib.import_module", fails)
            command.answer("a.py", list, "nvidia.dali")
        said = f"a.py: {package} does not load ({str(error) or type(error).__name__}); expected it installed, and"
        assert capsys.readouterr().err == f"{said} enough memory\n"
    with monkeypatch.context() as patch, pytest.raises(SystemExit, match="2"):
        patch.setattr("tempfile.tempdir", None)
        patch.setattr("tempfile._candidate_tempdir_list", lambda: ["/proc"])
        command.answer("a.py", list)
    assert capsys.readouterr().err.endswith("found in ['/proc']; expected one with room to write in: TMPDIR=FOLDER\n")
    monkeypatch.chdir(tmp_path)
    tmp_path.rmdir()
    with pytest.raises(SystemExit, match="2"):
        command.answer("a.py", list)
    assert f"called in {tmp_path} (deleted), which is not there; expected" in capsys.readouterr().err
    limited = "import resource, runpy, sys; resource.setrlimit(resource.RLIMIT_AS, (10**9, 10**9)); sys.argv[1:] = []; "
    done = run_program("-c", limited + "runpy.run_path('train.py', run_name='__main__')", check=2, fresh=True)
    assert done.stderr.startswith("train.py: torch does not load (") and done.stderr.count("\n") == 1
