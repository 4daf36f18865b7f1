"""A step of fine-tuning and its accuracy, each against the same thing written out."""

import copy
import dataclasses
import random

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from PIL import Image
from timm.data.mixup import Mixup
from timm.data.random_erasing import RandomErasing

from model.encoder import PackedAttention
from model.export import export_model
from pipeline import Index
from run.ranks import Ranks
from run.recipes import RECIPES
from transfer.finetuning import Tuning, evaluate, new_model, seed_everything
from transfer.recipes import TuneConfig

ALONE = Ranks(0, 1, 1, torch.device("cpu"))
STATISTICS = {"mean": [0.1, 0.4, 0.6], "std": [0.2, 0.25, 0.3]}
LR, BETAS, DECAY, CLIP, EMA, LAYER_DECAY = 0.01, (0.8, 0.9), 0.3, 0.5, 0.55, 0.5
PLAIN = TuneConfig(
    model="vit_tiny_patch16_224", depth=2, image_size=32, patch_size=8, precision="float32", lr=LR, betas=BETAS,
    weight_decay=DECAY, epochs=2, warmup_epochs=1, drop_path=0, mixup=0, cutmix=0, erasing=0, smoothing=0.2, ema=EMA,
    clip_norm=CLIP, layer_decay=LAYER_DECAY,
    position_embedding="learned", seed=3,
)  # fmt: skip
IMAGES = torch.randint(0, 256, (6, 32, 32, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
LABELS = torch.tensor([0, 1, 2, 2, 1, 0])


def normalised(images):
    pixels = images.permute(0, 3, 1, 2) / 255
    mean, std = (torch.tensor(STATISTICS[name])[:, None, None] for name in ("mean", "std"))
    return (pixels - mean) / std


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    """An encoder as a run leaves it: its folder."""
    folder = tmp_path_factory.mktemp("encoder")
    vit, description = new_model(PLAIN, 0)
    training = {"method": "APS", "recipe": "toy", "steps": 5, "images": 6}
    how = {"name": PLAIN.model, "arguments": description["arguments"], "training": training}
    return export_model(vit, folder / "encoder", **how, **STATISTICS)


def tuning(config, encoder=None, classes=3, ranks=ALONE):
    if encoder is not None:
        config = dataclasses.replace(config, encoder=str(encoder), depth=0, patch_size=0, image_size=0)
    vit, description = new_model(config, classes)
    with torch.no_grad():
        torch.nn.init.normal_(
            vit.head.weight, std=0.05, generator=torch.Generator().manual_seed(1)
        )  # whose loss is not log(3)
    return Tuning(config, vit, description | STATISTICS, ranks)


def layer(name):
    """Layers above that of a parameter, in a model of two blocks; the final norm is no part of the last one, as in the
    code release of MAE (util/lr_decay.py)."""
    if name.startswith(("head", "norm")):
        return 0
    return 1 if name.startswith("blocks.1") else 2 if name.startswith("blocks.0") else 3


def test_steps_are_adamw_by_layers_with_a_running_mean(encoder):
    """The loss with smoothed labels, the clipped gradient, AdamW, the schedule and the mean, written out."""
    made = tuning(PLAIN, encoder)
    assert made.forward is made.network, "nothing is compiled on a CPU, nothing distributed over one rank"
    network, first, second, mean = copy.deepcopy(made.network).train(), {}, {}, {}
    for step, epoch in enumerate((0.5, 1.0, 1.25, 1.75)):
        before = copy.deepcopy(made.network.state_dict())
        network.load_state_dict(before)  # no error of rounding goes on to the next step
        logs = network(normalised(IMAGES)).log_softmax(1)
        loss = -((0.8 * F.one_hot(LABELS, 3) + 0.2 / 3) * logs).sum(1).mean()
        gradients = dict(zip(before, torch.autograd.grad(loss, list(network.parameters())), strict=True))
        norm = torch.cat([gradient.flatten() for gradient in gradients.values()]).norm()
        assert norm > CLIP

        figures, finite = made.step(IMAGES, LABELS, step, epoch)
        assert finite and figures == pytest.approx([loss.item(), norm.item()], rel=1e-3)
        rate = LR * (0.5, 1.0, 0.5 * (1 + 2**-0.5), 0.5 * (1 - 2**-0.5))[step]
        after, averaged = made.network.state_dict(), made.networks()["ema"].state_dict()
        for name, gradient in gradients.items():
            gradient = gradient * CLIP / norm
            first[name] = BETAS[0] * first.get(name, 0) + (1 - BETAS[0]) * gradient
            second[name] = BETAS[1] * second.get(name, 0) + (1 - BETAS[1]) * gradient**2
            away = first[name] / (1 - BETAS[0] ** (step + 1))
            away = away / ((second[name] / (1 - BETAS[1] ** (step + 1))).sqrt() + 1e-8)
            if before[name].ndim > 1 and name not in ("pos_embed", "cls_token"):
                away = away + DECAY * before[name]
            away = -rate * LAYER_DECAY ** layer(name) * away
            error = after[name] - before[name] - away
            if name.endswith("qkv.bias"):  # that of the keys has no gradient but for rounding
                error = error[(torch.arange(len(error)) < 192) | (torch.arange(len(error)) >= 384)]
            assert error.norm() < 2e-3 * away.norm(), (name, step)
            keep = min(EMA, 1 - (1 + step) ** (-2 / 3))  # 0, 0.37, 0.52, 0.55
            mean[name] = keep * mean.get(name, 0) + (1 - keep) * after[name]
            torch.testing.assert_close(averaged[name], mean[name], rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize(
    "change",
    [
        {"mixup": 0.8}, {"cutmix": 1.0}, {"mixup": 0.8, "cutmix": 1.0}, {"erasing": 0.7}, {"clip_norm": 0, "ema": 0},
        {"drop_path": 0.5},
    ],
    ids=str,
)  # fmt: skip
def test_what_is_done_to_images_and_labels_follows_from_the_step(change):
    """Erasing, then mixing, whose labels are smooth already; whatever was drawn before."""
    config = dataclasses.replace(PLAIN, **change)
    made, losses = tuning(config), []
    network = copy.deepcopy(made.network).train()
    for step, rank in ((0, 0), (1, 0), (1, 1), (1, 0)):
        seed_everything(config.seed, step, rank)
        images, target = RandomErasing(config.erasing, mode="pixel", device="cpu")(normalised(IMAGES)), LABELS
        smoothing = config.smoothing
        if config.mixup or config.cutmix:
            mix = Mixup(config.mixup, config.cutmix, label_smoothing=smoothing, num_classes=3)
            (images, target), smoothing = mix(images, target), 0.0
        with torch.no_grad():
            losses.append(F.cross_entropy(network(images), target, label_smoothing=smoothing).item())
        made.network.load_state_dict(network.state_dict())
        made.ranks = Ranks(rank, 1, 1, ALONE.device)
        (loss, _), _ = made.step(IMAGES, LABELS, step, 1.0)
        assert loss.item() == pytest.approx(losses[-1], rel=1e-4)
        assert not any(parameter.grad is not None for parameter in made.network.parameters())
    assert list(made.networks()) == (["", "ema"] if config.ema else [""])
    drawn = "clip_norm" not in change
    assert losses[1] == losses[3] and (len(set(losses)) == 3) == drawn
    rates = [block.drop_path1.drop_prob if config.drop_path else 0 for block in made.network.blocks[1:]]
    assert rates == [config.drop_path]  # of the last block


def test_states_of_the_generators_follow_from_the_step():
    def drawn(*key):
        seed_everything(*key)
        return random.random(), np.random.random(), torch.rand(()).item()

    keys = (5, 2, 1), (6, 2, 1), (5, 3, 1), (5, 2, 0), (-5, 2, 1), (2**63 - 1, 2, 1)
    several = [drawn(*key) for key in keys]
    assert drawn(*keys[0]) == several[0]
    assert all(len(set(values)) == len(keys) for values in zip(*several, strict=True))


def test_an_encoder_at_another_size(encoder):
    config = dataclasses.replace(PLAIN, encoder=str(encoder), depth=0, patch_size=0, image_size=48)
    vit, description = new_model(config, 3)
    assert vit.patch_embed.img_size == (48, 48) and description["arguments"]["img_size"] == 48
    own, _ = new_model(dataclasses.replace(config, image_size=0), 3)
    assert own.patch_embed.img_size == (32, 32)


def test_new_models():
    """From scratch: as the pretraining recipe has it where nothing else is said; a classifier that hardly speaks."""
    like = RECIPES["cifar-vit-t"]
    for classes in (7, 0):
        vit, description = new_model(TuneConfig(recipe="cifar", position_embedding="learned"), classes)
        own = {"img_size": 32, "patch_size": 2, "num_classes": classes}
        assert description["arguments"] == own and description["model"] == like.model and len(vit.blocks) == 12
        assert (description["mean"], description["std"]) == (like.mean, like.std)
        assert description["training"] == {"method": "none"}
        assert vit.num_classes == classes and all(parameter.requires_grad for parameter in vit.parameters())
        assert all(type(block.attn) is PackedAttention for block in vit.blocks)
    config = dataclasses.replace(PLAIN, model=None, position_embedding="sincos")
    before = torch.random.get_rng_state()
    vit, description = new_model(config, 100)
    assert torch.equal(before, torch.random.get_rng_state())
    assert description["arguments"] == {"img_size": 32, "patch_size": 8, "depth": 2, "num_classes": 100}
    assert vit.patch_embed.proj.weight.requires_grad and vit.pos_embed.requires_grad
    assert vit.head.weight.std().item() == pytest.approx(2e-5, rel=0.05) and not vit.head.bias.any()
    learned, _ = new_model(dataclasses.replace(config, position_embedding="learned"), 100)
    assert (vit.pos_embed.abs() <= 1).all() and vit.pos_embed.std() > 0.3 and learned.pos_embed.std() < 0.1
    assert torch.equal(vit.head.weight, learned.head.weight)
    other, _ = new_model(dataclasses.replace(config, seed=4), 100)
    assert not torch.equal(vit.head.weight, other.head.weight)
    scales = {group["lr_scale"] for group in tuning(config).optimizer.param_groups}
    assert scales == {1.0}, "no layer has a rate of its own where all begin anew"


def test_a_state_is_all_that_a_step_changes(encoder):
    for ema in (0.9, 0.0):
        config = dataclasses.replace(PLAIN, ema=ema, mixup=0.8)
        whole, parts = tuning(config, encoder), tuning(config, encoder)
        whole.step(IMAGES, LABELS, 0, 0.5)
        state = whole.state_dict()
        assert whole.state_dict(keep=False) == {} and '"steps": 5' in state["origin"]
        whole.step(IMAGES, LABELS, 1, 1.0)
        parts.load_state_dict(state)
        parts.step(IMAGES, LABELS, 1, 1.0)
        for one, other in zip(whole.networks().values(), parts.networks().values(), strict=True):
            assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_a_step_without_a_finite_gradient_changes_no_weight():
    made = tuning(PLAIN)
    for broken in (False, True, False):
        before = {name: tensor.clone() for name, tensor in made.network.state_dict().items()}
        mean = made.mean.clone()
        made.mean += float("nan") if broken else 0
        _, finite = made.step(IMAGES, LABELS, 1, 1.0)
        made.mean.copy_(mean)
        after = made.network.state_dict()
        assert finite != broken
        assert all(torch.equal(before[name], after[name]) for name in before) == broken
        assert all(tensor.isfinite().all() for tensor in after.values())


def test_gradients_are_shared_by_two_ranks_or_more():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        made = tuning(PLAIN, ranks=Ranks(0, 2, 2, torch.device("cpu")))
        assert type(made.forward) is torch.nn.parallel.DistributedDataParallel
        assert made.forward.module is made.network
    finally:
        dist.destroy_process_group()


@dataclasses.dataclass(frozen=True)
class Half(Ranks):
    """One of two ranks, which hears of what the other has found."""

    def sum(self, tensor):
        return tensor + torch.arange(len(tensor))

    def gather(self, value):
        return [value, {99: "of the other"} if isinstance(value, dict) else value]


@pytest.mark.parametrize("count", [5, 6])
def test_accuracy_counts_each_labelled_image_once(tmp_path, count):
    """Against the scores of the network on the pixels; labels by name, what does not decode left out."""
    made = tuning(dataclasses.replace(PLAIN, ema=0.5), classes=count)
    torch.nn.init.normal_(made.ema.module.head.weight, std=0.05, generator=torch.Generator().manual_seed(2))
    pixels = torch.randint(0, 256, (40, 32, 32, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(3))
    for number, image in enumerate(pixels.numpy()):
        Image.fromarray(image).save(tmp_path / f"{number}.png")
    (tmp_path / "7.png").write_bytes(b"")
    labels = np.arange(40) % 5 - 1  # also none
    index = Index(tmp_path, [f"{n}.png" for n in range(40)], labels, np.full((40, 2), 32), ("d", "c", "b", "a"), {})
    classes = tuple("abcdef"[:count])

    def expected(samples):
        truth = torch.tensor([classes.index("dcba"[labels[s]]) for s in samples])[:, None]
        found = []
        for network in made.networks().values():
            order = network.eval()(normalised(pixels[samples])).argsort(1, descending=True)
            found += [(order[:, :1] == truth).sum().item(), (order[:, :5] == truth).sum().item()]
        return found

    labelled = [s for s in range(40) if s % 5]
    samples = [s for s in labelled if s != 7]
    scores, bad = evaluate(made, index, classes, threads=1, batch_size=8)
    names = ("top1", "top5", "top1_ema", "top5_ema")
    right = expected(samples)
    figures = {name: 100 * n / 31 for name, n in zip(names, right, strict=True) if count > 5 or "top1" in name}
    assert scores == pytest.approx(figures | {"eval_images": 31}) and bad == {7: "empty file"}
    assert len(set(right)) == 4 if count > 5 else right[1] == right[3] == 31

    made.ranks = Half(1, 2, 1, ALONE.device)
    scores, bad = evaluate(made, index, classes, threads=1)
    half = [s for s in labelled[1::2] if s != 7]
    *right, seen = (n + place for place, n in enumerate([*expected(half), len(half)]))
    assert scores["eval_images"] == seen == len(half) + 4 and bad == {7: "empty file", 99: "of the other"}
    assert [scores["top1"], scores["top1_ema"]] == pytest.approx([100 * right[0] / seen, 100 * right[2] / seen])


def test_accuracy_of_nothing_is_an_error(tmp_path):
    (tmp_path / "a.png").write_bytes(b"")
    index = Index(tmp_path, ["a.png"], np.array([0]), np.full((1, 2), 32), ("a",), {})
    with pytest.raises(OSError, match=r"no evaluation image in .* decodes, of 1"):
        evaluate(tuning(PLAIN), index, ("a", "b", "c"), threads=1)
