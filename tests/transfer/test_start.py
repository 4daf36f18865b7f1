"""Pretraining that begins with an encoder: what is taken from it, what is refused, and what is kept of it."""

import dataclasses
import json

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file

import train
from run.ranks import Ranks
from run.training import Training
from transfer import start
from transfer.pretrained import load_encoder

NAME, CPU = "vit_tiny_patch16_224", torch.device("cpu")
# As a hub has it; nothing of it is as in the recipe.
OWN = {"img_size": 24, "patch_size": 6, "depth": 2, "class_token": False, "reg_tokens": 2, "global_pool": "avg"}
STATISTICS = {"mean": [0.1, 0.2, 0.3], "std": [0.4, 0.5, 0.6]}
LITTLE = (
    "--recipe", "toy", "--batch-size", "4", "--head-hidden", "16", "--head-out", "8", "--precision", "float32",
    "--device", "cpu",
)  # fmt: skip


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """A folder in timm's hub layout, of a model that leaves some things out at random."""
    folder = tmp_path_factory.mktemp("hub")
    torch.manual_seed(0)
    vit = timm.create_model(NAME, num_classes=0, **OWN)
    torch.nn.init.normal_(vit.pos_embed)
    save_file(vit.state_dict(), folder / "model.safetensors")
    known = {"architecture": NAME, "model_args": OWN | {"drop_path_rate": 0.5}, "pretrained_cfg": STATISTICS}
    (folder / "config.json").write_text(json.dumps(known))
    return folder


def begin(*words):
    return start.begin(train.parse([*LITTLE, *map(str, words)]))


def differing(vit, state):
    """Names of the weights that are not those of a state dict."""
    return [name for name, value in vit.state_dict().items() if not torch.equal(value, state[name])]


def test_what_is_the_encoders_and_what_the_recipes(hub, tmp_path):
    state, mean, std = load_file(hub / "model.safetensors"), (0.1, 0.2, 0.3), (0.4, 0.5, 0.6)
    config, vit, origin = begin("--encoder", hub, "--output", tmp_path)
    recipe = train.parse([*LITTLE, "--encoder", "none", "--output", str(tmp_path)])
    own = {"encoder": str(hub), "model": NAME, "image_size": 24, "patch_size": 6, "depth": 2, "mean": mean, "std": std}
    assert config == dataclasses.replace(recipe, **own)
    assert not differing(vit, state) and origin["arguments"] == {"num_classes": 0, **OWN}
    # A recipe fixes what was loaded, or trains it.
    fixed = {name for name, value in vit.named_parameters() if not value.requires_grad}
    assert fixed == {"pos_embed"}
    _, vit, _ = begin("--encoder", hub, "--position-embedding", "learned", "--frozen-patch-embed")
    fixed = {name for name, value in vit.named_parameters() if not value.requires_grad}
    assert fixed == {"patch_embed.proj.weight", "patch_embed.proj.bias"} and not differing(vit, state)
    # What may be another one, and what says what it is.
    said = "--image-size", 36, "--std", 1, 1, 2, "--depth", 2, "--patch-size", 6, "--model", NAME
    config, vit, _ = begin("--encoder", hub, *said)
    assert (config.image_size, config.mean, config.std, vit.patch_embed.grid_size) == (36, mean, (1, 1, 2), (6, 6))
    assert differing(vit, load_encoder(hub, image_size=36)[0].state_dict()) == []


@pytest.mark.parametrize(
    "words, said",
    [
        (("--depth", 4), r"--depth 4: --encoder \S+ has 2; expected that or no --depth$"),  # that of the recipe, said
        (("--patch-size", 8), r"--patch-size 8: --encoder \S+ has 6; expected that or no --patch-size$"),
        (("--model", "vit_small_patch16_224"), rf"--model vit_small_patch16_224: \S+ is a {NAME}; expected that or no"),
        (("--image-size", 32), r"--image-size 32 is not divisible by the patch size 6"),
    ],
)
def test_what_is_contrary_is_refused(hub, words, said):
    with pytest.raises(ValueError, match=said):
        begin("--encoder", hub, *words)


def test_without_an_encoder_nothing_is_left_open():
    for name in ("mean", "std", "model"):
        with pytest.raises(ValueError, match=rf"--{name} None: expected a value, as there is no --encoder"):
            train.parse([*LITTLE, f"--{name}", "None"])


def test_both_networks_begin_with_it_and_its_checkpoint_describes_it(hub, tmp_path):
    """Through a step and through the state, which needs nothing that it was loaded from; no step draws at random."""
    config, vit, origin = begin("--encoder", hub, "--output", tmp_path, "--ema", 0.9, "--warmup-epochs", 0)
    state = load_file(hub / "model.safetensors")
    training = Training(config, CPU, encoder=vit, origin=origin)
    assert not differing(training.network.encoder, state) and not differing(training.key_network.encoder, state)
    patches = torch.randn(2, 4, training.keep, 3 * 36)
    numbers = torch.randint(0, 16, (2, 4, training.keep), dtype=torch.int32)
    with torch.no_grad():
        assert torch.equal(*(training.query(patches, numbers)[0] for _ in range(2)))
    training.step(patches, numbers, 0.1)
    moved = set(differing(training.network.encoder, state))
    assert moved == {name for name, value in vit.named_parameters() if value.requires_grad}
    run = json.dumps({"config": dataclasses.asdict(config), "data": {"images": 3}}, default=str)
    (tmp_path / "checkpoints").mkdir()
    torch.save(training.state_dict() | {"run": run, "step": 1}, tmp_path / "checkpoints/step-00000001.pt")
    found, description = load_encoder(tmp_path)
    assert not differing(found, training.network.encoder.state_dict())
    assert description["arguments"] == origin["arguments"] and (*description["std"],) == config.std
    assert description["training"]["encoder"] == origin["training"]


def test_all_ranks_begin_with_the_copy_that_the_run_keeps(hub, tmp_path):
    """Also where the run that it comes from went on between two looks at it, and where that is gone."""
    config, vit, origin = begin("--encoder", hub, "--output", tmp_path / "run")
    (tmp_path / "run").mkdir()
    start.keep(config, vit, origin, Ranks(0, 1, 1, CPU))
    expected = {name: value.clone() for name, value in vit.state_dict().items()}
    torch.nn.init.zeros_(vit.reg_token)

    class Second(Ranks):
        def on_first(self, work):
            return None

    start.keep(config, vit, origin, Second(1, 2, 2, CPU))
    assert not differing(vit, expected)
    torch.nn.init.zeros_(vit.reg_token)
    start.keep(config, vit, origin, Ranks(0, 1, 1, CPU))  # again: the first copy stays
    assert not differing(start.first(config), expected)
    again, vit, description = begin("--encoder", "gone", "--output", tmp_path / "run")
    assert again == dataclasses.replace(config, encoder="gone") and not differing(vit, expected)
    assert description == origin


@pytest.mark.parametrize("warmup, alike", [(10, True), (0, False)])
def test_the_first_steps_do_not_undo_the_encoder(hub, warmup, alike):
    """The gradients of new heads are noise: with a warm-up, features still say after some steps what they said before,
    in how images differ; from the full rate at once they do not."""
    config, vit, origin = begin("--encoder", hub, "--warmup-epochs", warmup, "--epochs", 100, "--ema", 0.99)
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(32, 3, 24, 24, generator=generator)

    def features():
        with torch.no_grad():
            rows = vit.forward_head(vit.forward_features(images), pre_logits=True)
        return torch.nn.functional.normalize(rows - rows.mean(0))

    before, training = features(), Training(config, CPU, encoder=vit, origin=origin)
    for step in range(20):
        patches = torch.randn(2, 4, training.keep, 3 * 36, generator=generator)
        numbers = torch.stack([torch.randperm(16, generator=generator)[: training.keep] for _ in range(8)])
        training.step(patches, numbers.reshape(2, 4, -1).int(), step / 20)
    cosine = (before * features()).sum(1).mean()
    assert cosine > 0.999 if alike else cosine < 0.98, cosine
