"""embed.py: rows, names and classes of a folder, one file or another, on one rank or two."""

import json

import numpy as np
import pytest
import timm
import torch
from conftest import photo, run_program
from PIL import Image

import embed
from pipeline import Index


def embedded(run, data, output, *more):
    embed.main([
        "--encoder", str(run), "--data", str(data), "--output", str(output), "--device", "cpu", "--threads", "1", *more
    ])  # fmt: skip


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def hostile(tmp_path):
    """Images of the encoder's own size in two classes and in none, one cut short, one that is text."""
    data = tmp_path / "data"
    for number, name in enumerate(["cat/b.png", "cat/a.png", "dog/new\nline.png", "none.png", "dog/d.png"]):
        (data / name).parent.mkdir(parents=True, exist_ok=True)
        photo(number, 32, 32).save(data / name)
    photo(9).save(data / "cat" / "cut.jpg")
    (data / "cat" / "cut.jpg").write_bytes((data / "cat" / "cut.jpg").read_bytes()[:-300])
    (data / "dog" / "text.jpg").write_text("no image at all")
    return data


def test_rows_are_what_timm_gives_and_bad_files_are_named(undisturbed, hostile, tmp_path, capsys):
    output = tmp_path / "features.npy"
    embedded(undisturbed[0], hostile, output)
    said, rows, names = capsys.readouterr().out, np.load(output), lines(tmp_path / "features.jsonl")
    assert {line["path"]: line["class"] for line in names} == {
        "cat/a.png": "cat", "cat/b.png": "cat", "dog/d.png": "dog", "dog/new\nline.png": "dog", "none.png": "",
    }  # fmt: skip
    encoder = timm.create_model(f"local-dir:{undisturbed[0] / 'encoder'}", pretrained=True).eval()
    transform = timm.data.create_transform(**timm.data.resolve_data_config({}, model=encoder))
    with torch.inference_mode():
        pixels = torch.stack([transform(Image.open(hostile / line["path"])) for line in names])
        torch.testing.assert_close(torch.from_numpy(rows), encoder(pixels), rtol=1e-3, atol=1e-3)
    assert rows.dtype == np.float32 and rows.shape == (5, 192)
    assert {line["path"] for line in lines(tmp_path / "features.rejected.jsonl")} == {"cat/cut.jpg", "dog/text.jpg"}
    assert "left out 2 of 7 files" in said and "cut.jpg" in said and "text.jpg" in said
    there = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    assert there.keys() == {"features.npy", "features.jsonl", "features.rejected.jsonl"}
    assert not [name for name in there if not (tmp_path / name).stat().st_mode & 0o004]
    with pytest.raises(SystemExit, match="2"):
        embedded(undisturbed[0], hostile, output)
    assert "features.npy is there already; expected another name, or its removal" in capsys.readouterr().err
    assert there == {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}


def test_parquet_has_the_same(undisturbed, hostile, tmp_path, monkeypatch):
    parquet = pytest.importorskip("pyarrow.parquet")
    monkeypatch.setattr(embed, "ROWS", 2)  # several pieces
    for name in ("a.npy", "a.parquet"):
        embedded(undisturbed[0], hostile, tmp_path / name)
        (tmp_path / "a.rejected.jsonl").unlink()
    table = parquet.read_table(tmp_path / "a.parquet")
    assert table.column_names == ["path", "class", "features"]
    assert str(table.schema.field("features").type).startswith("fixed_size_list<element: float>[192]")
    assert np.array_equal(np.stack(table["features"].to_numpy()), np.load(tmp_path / "a.npy"))
    assert table.select(["path", "class"]).to_pylist() == lines(tmp_path / "a.jsonl")
    assert embed.as_utf8("caf\udce9") == "caf\\udce9"


def test_two_ranks_write_what_one_does(undisturbed, photos, tmp_path):
    """More batches than one a rank, of images that one of them alone has to leave out."""
    index = Index.scan(photos)
    files = [index.file(i) for i in range(len(index))]
    cut = tmp_path / "cut.jpg"
    cut.write_bytes((photos / "a/00.jpg").read_bytes()[:-200])
    (tmp_path / "list.txt").write_text("\n".join([*files, *files, str(cut), *files]))
    common = "--encoder", undisturbed[0], "--data", tmp_path / "list.txt", "--device", "cpu"
    run_program("embed.py", *common, "--output", tmp_path / "two.npy", ranks=2)
    run_program("embed.py", *common, "--output", tmp_path / "one.npy")
    one, two = (np.load(tmp_path / f"{name}.npy") for name in ("one", "two"))
    assert one.shape == (144, 192) and np.array_equal(one, two) and np.array_equal(one[:48], one[96:])
    for suffix in ("jsonl", "rejected.jsonl"):
        assert (tmp_path / f"one.{suffix}").read_bytes() == (tmp_path / f"two.{suffix}").read_bytes()
    assert {path.suffix for path in tmp_path.iterdir()} == {".jpg", ".txt", ".npy", ".jsonl"}


def test_what_cannot_be_done_is_one_line_and_leaves_nothing(undisturbed, hostile, tmp_path, capsys, monkeypatch):
    def ended(data, output="out.npy", *more):
        with pytest.raises(SystemExit) as end:
            embedded(undisturbed[0], data, tmp_path / "out" / output, *more)
        said = end.value.code if isinstance(end.value.code, str) else capsys.readouterr().err
        assert said.strip().count("\n") == 0 and said.startswith("embed.py: ")
        assert not (tmp_path / "out").exists() or not [*(tmp_path / "out").iterdir()]
        return said, end.value.code

    (tmp_path / "empty").mkdir()
    (tmp_path / "cut").mkdir()
    (hostile / "cat" / "cut.jpg").rename(tmp_path / "cut" / "cut.jpg")
    said, code = ended(tmp_path / "empty")
    assert "no usable image" in said and code == 2
    assert "no image of " in ended(tmp_path / "cut")[0]
    assert "expected a name that ends in .npy or .parquet" in ended(hostile, "out.csv")[0]
    with pytest.raises(ValueError, match=r"--output s3://b/x[.]npy: expected a file on a disk"):
        embed.parse(["--output", "s3://b/x.npy"])
    with pytest.raises(ValueError, match="--encoder is missing; expected a run"):
        embed.parse(["--data", "x"])
    with pytest.raises(ValueError, match=r"--data is missing; expected a folder"):
        embed.parse(["--encoder", "x"])

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(embed, "write_npy", full)
    with pytest.raises(OSError, match="No space"):
        embedded(undisturbed[0], hostile, tmp_path / "out" / "out.npy")
    assert not [*(tmp_path / "out").iterdir()]
