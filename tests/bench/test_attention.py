"""Attention maps against weights by hand, and neighbours, as a picture."""

import re
import shutil

import pytest
import timm
import torch
from conftest import ROOT
from PIL import Image

from bench.attention import attention_maps, index_of, nearest
from bench.attention import main as attention
from pipeline import Index
from transfer.pretrained import load_encoder


def by_hand(vit, images):
    """Attention weights of the last block from its projections, [B, heads, T, T]."""
    tokens = vit.norm_pre(vit.patch_drop(vit._pos_embed(vit.patch_embed(images))))
    for block in vit.blocks[:-1]:
        tokens = block(tokens)
    last = vit.blocks[-1]
    queries, keys, _ = last.attn.qkv(last.norm1(tokens)).unflatten(2, (3, 3, 64)).permute(2, 0, 3, 1, 4)
    return (queries @ keys.transpose(-2, -1) / 64**0.5).softmax(-1)


@pytest.mark.parametrize("tokens, first", [({}, 1), ({"class_token": False, "reg_tokens": 2, "global_pool": "avg"}, 2)])
def test_attention_maps(tokens, first):
    vit = timm.create_model("vit_tiny_patch16_224", img_size=(32, 48), patch_size=8, depth=2, **tokens).eval()
    images = torch.randn(2, 3, 32, 48)
    maps = attention_maps(vit, images)
    weights = by_hand(vit, images)
    expected = weights[:, :, 0] if not tokens else sum(weights[:, :, row] for row in range(first, 26)) / 24
    assert maps.shape == (2, 3, 4, 6)
    torch.testing.assert_close(maps.flatten(2), expected[..., first:])
    with pytest.raises(ValueError, match="expected timm's Attention in every block, got a ParallelThingsBlock"):
        attention_maps(timm.create_model("vit_small_patch16_18x2_224", img_size=32, depth=1), images)


def test_attention_sheet(undisturbed, photos, tmp_path, capfd):
    """Of a file that the bank holds twice, the copy is its nearest neighbour, and the file itself is not shown."""
    pytest.importorskip("matplotlib")
    bank = shutil.copytree(photos, tmp_path / "bank")
    (bank / "a" / "cut.jpg").write_bytes((bank / "a" / "00.jpg").read_bytes()[:-200])
    shutil.copy(bank / "a" / "00.jpg", bank / "b" / "copy.jpg")
    vit, description = load_encoder(undisturbed[0])
    given, index = index_of([bank / "a" / "00.jpg", bank / "c" / "02.jpg"]), Index.scan(bank)
    how = {"mean": description["mean"], "std": description["std"], "device": torch.device("cpu"), "threads": 1}
    found = nearest(vit.eval(), given, index, 1000, **how)
    names = [[index.paths[sample] for sample, _ in row] for row in found]
    assert names[0][0] == "b/copy.jpg" and 1.00001 > found[0][0][1] > 0.99999 > found[0][1][1]
    assert "a/00.jpg" not in names[0] and "c/02.jpg" not in names[1] and len(names[1]) == 5
    capfd.readouterr()
    output = tmp_path / "sheet.png"
    more = ["--bank", bank, "--image-size", "64", "--output", output]
    assert attention([*map(str, [undisturbed[0], bank / "a" / "00.jpg", bank / "c" / "02.jpg", *more])]) == 0
    said = capfd.readouterr().err.splitlines()
    assert said[-1].startswith("left out of the bank: a/cut.jpg: does not decode") and "_decoder]" not in "".join(said)
    with Image.open(output) as sheet:
        assert sheet.width > 1500 and len(sheet.getcolors(10**7)) > 1000
    assert attention([*map(str, [undisturbed[0], bank / "a" / "cut.jpg", ROOT / "README.md"])]) == 2
    assert re.search(r"bench attention: expected images, got .*README.md: ", capfd.readouterr().err)
