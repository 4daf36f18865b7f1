"""A folder as a web crawl leaves it, through the whole program: it trains, and names what it left out and why."""

import io
import json
import shutil

import numpy as np
import pytest
from conftest import SMALL, photo, train
from PIL import Image

from train import main


def encoded(image, form="JPEG", **options):
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def oriented(orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encoded(photo(orientation), exif=exif)


def claiming(height, width):
    """A JPEG whose header claims another size."""
    data = encoded(photo(9))
    at = data.index(b"\xff\xc0") + 5
    return data[:at] + height.to_bytes(2, "big") + width.to_bytes(2, "big") + data[at + 4 :]


def inputs():
    """{file name: (content, None or words of the reason why it is left out)}"""
    jpeg, picture = encoded(photo(0)), photo(1)
    grey_alpha = picture.convert("LA")
    cmyk = encoded(picture.convert("CMYK"))
    adobe = cmyk.index(b"Adobe") + 11  # the marker's last byte says how colours are coded: 2 is YCCK
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (4000, 1, 3), np.uint8))
    good = {
        "png.JPEG": encoded(picture, "PNG"), "bmp.JPEG": encoded(picture, "BMP"), "webp.JPEG": encoded(picture, "WEBP"),
        "cmyk.jpg": cmyk, "ycck.jpg": cmyk[:adobe] + b"\x02" + cmyk[adobe + 1 :],
        "grey.jpg": encoded(picture.convert("L")), "grey alpha.png": encoded(grey_alpha, "PNG"),
        "palette.png": encoded(picture.convert("P"), "PNG"), "rgba.png": encoded(picture.convert("RGBA"), "PNG"),
        "progressive.jpg": encoded(picture, progressive=True), "trailing.jpg": jpeg + b"garbage" * 100,
        "dot.jpg": encoded(photo(2, 1, 1)), "two wide.jpg": encoded(photo(2, 300, 2)),
        "thread.jpg": encoded(noise), "thread.png": encoded(noise.transpose(Image.Transpose.ROTATE_90), "PNG"),
        "taller than its data.jpg": claiming(300, 80),  # the decoder fills the rest
        "naïve \u4f60 'quoted' $(x).jpg": jpeg, "line\nbreak.jpg": jpeg,
    }  # fmt: skip
    good |= {f"exif {number}.jpg": oriented(number) for number in range(1, 9)}
    bad = {
        "one byte less.jpg": (jpeg[:-1], "does not decode"),
        "half.jpg": (jpeg[: len(jpeg) // 2], "does not decode"),
        "header.jpg": (jpeg[: jpeg.index(b"\xff\xda")], "truncated header"),
        "empty.jpg": (b"", "empty file"),
        "page.jpg": (b"<!DOCTYPE html><html><body>404</body></html>", "not an image"),
        "zeros.jpg": (bytes(5000), "not an image"),
        "gif.jpg": (encoded(picture, "GIF"), "GIF is not supported"),
        "avif.jpg": (b"\0\0\0\x1cftypavif\0\0\0\0avifmif1miaf" + bytes(400), "not an image|AVIF|damaged"),
        "bomb.jpg": (claiming(60000, 60000), "pixels"),
    }
    return {name: (content, None) for name, content in good.items()} | bad


@pytest.fixture
def crawled(tmp_path):
    root = tmp_path / "crawl ~ 2026"
    for name, (content, _) in inputs().items():
        path = root / "ab"[len(name) % 2] / "nested" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    (root / "no images").mkdir()
    (root / ".ipynb_checkpoints").mkdir()
    for hidden in (root / "a" / "._x.jpg", root / ".ipynb_checkpoints" / "x.jpg"):
        hidden.write_text("not an image")
    (root / "c").symlink_to(root / "a")
    return root


def test_a_crawled_folder_trains_and_is_reported(crawled, tmp_path):
    output, enough = tmp_path / "run", ("--epochs", "6")  # for every image to be drawn: incomplete batches are dropped
    done = train(crawled, output, *enough)
    lines = [json.loads(line) for line in (output / "rejected.jsonl").read_text().splitlines()]
    reasons = {line["path"]: line["reason"] for line in lines}
    expected = {name: words for name, (_, words) in inputs().items() if words}
    named = {path.rpartition("/")[2]: reason for path, reason in reasons.items()}
    assert named.keys() == expected.keys(), named.keys() ^ expected.keys()
    for name, words in expected.items():
        assert any(word in named[name] for word in words.split("|")), (name, named[name])
    assert f"left out {len(lines)} of " in done.stdout and (output / "encoder/model.safetensors").exists()
    assert "\x1b" not in done.stderr  # nothing of the decoder's own
    # What is known to be bad costs nothing when the run goes on, and is still reported.
    again = train(crawled, output, *enough)
    assert " was the last" in again.stdout
    assert (output / "rejected.jsonl").read_text().count("\n") == len(lines)


def test_a_changed_folder_is_refused_or_continued_without_the_changes(photos, tmp_path, capsys):
    data, output = tmp_path / "data", tmp_path / "run"
    shutil.copytree(photos, data)
    arguments = [*SMALL, "--data", str(data), "--output", str(output)]
    main([*arguments, "--max-steps", "6"])
    (data / "a" / "00.jpg").unlink()
    photo(1, 33, 44).save(data / "b" / "01.jpg")
    photo(2).save(data / "b" / "new.jpg")
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    said = capsys.readouterr().err
    assert ended.value.code == 2
    assert "1 gone (a/00.jpg), 1 new (b/new.jpg), 1 changed (b/01.jpg)" in said and "--resume changed" in said
    main([*arguments, "--resume", "changed", "--max-steps", "9"])
    assert "steps 7 to 9" in capsys.readouterr().out
    lines = [json.loads(line) for line in (output / "rejected.jsonl").read_text().splitlines()]
    reasons = {"a/00.jpg": "not there any more", "b/01.jpg": "not the file that it was"}
    assert lines == [{"path": path, "reason": reason} for path, reason in reasons.items()]
    for name in ("a/00.jpg", "b/01.jpg"):  # what is back is used again
        shutil.copy2(photos / name, data / name)
    (data / "b" / "new.jpg").unlink()
    main([*arguments, "--max-steps", "12"])
    assert not (output / "rejected.jsonl").read_text()
