"""What an optimizer step has to compute, to move and to keep, counted from its config.

The step is a list of operations, each of which takes as long as its arithmetic or its memory traffic, whichever is
longer: max(FLOP / best matrix product, bytes / copy bandwidth). The sum is the time of a step whose operations run at
the machine's ceilings one after the other, with every activation through memory: an operation reads its inputs and
writes its outputs once. r are rows (tokens or images of both views), e the bytes of an element.

- Product of [r,i] and [i,o]: 2rio FLOP, ri + io + ro elements. Biases, residual sums, GELU and its derivative happen
  inside: GELU costs a second output, which the backward pass reads; a residual sum costs reading the other summand.
  Backward: two such products, for the weights and for the input (which patches do not need; none for a frozen
  embedding).
- Attention over T tokens: 4T FLOP per token and dimension and 4 elements, backward 10T, as the weights are computed
  again, and 7.
- In the last block the class token alone asks, and is alone from there on: one row of T for queries, projection, MLP
  and norms but the first.
- Layer norm: reads and writes a row; backward reads the gradient, the input and the gradient that passes by outside,
  and writes their sum.
- Batch norm with ReLU: reads and writes a row; backward reads two and writes one.
- Gather: reads the kept pixels as bytes and writes them as elements.
- Update, in float32 per parameter: reads the gradient for its norm, with it the average it is clipped by, if that is a
  vector; then reads the gradient and reads and writes parameter, both moments, that average and the momentum network,
  and writes both networks once more as elements, where those are not float32.

At 790 TFLOP/s and 3.0 TB/s (an H100), batch 512 and bfloat16 the recipe imagenet-vit-s could do 28,880 pairs/s and
imagenet-vit-b 9,670; without the update 30,230 and 10,050.
"""

from dataclasses import dataclass
from itertools import pairwise

import timm
import torch

from run.recipes import Config
from run.training import encoder_arguments, plan_patches


@dataclass(frozen=True)
class Sizes:
    """Of a config: B images a step, K kept patches and T tokens a view, depth blocks of width D with H heads and an MLP
    of width M; the widths that the heads go through."""

    images: int
    keep: int
    tokens: int
    pixels: int  # numbers of a patch: 3*P*P
    depth: int
    width: int
    heads: int
    hidden: int
    projector: tuple[int, ...]
    predictor: tuple[int, ...]
    learned_embedding: bool
    momentum: bool
    clipped: bool

    @classmethod
    def of(cls, config: Config) -> "Sizes":
        patch, _, keep = plan_patches(config)
        with torch.device("meta"):
            vit = timm.create_model(config.model, **encoder_arguments(config))
        hidden, width = config.head_hidden, vit.embed_dim
        return cls(
            images=config.batch_size, keep=keep, tokens=keep + vit.num_prefix_tokens, pixels=3 * patch**2,
            depth=len(vit.blocks), width=width, heads=vit.blocks[0].attn.num_heads,
            hidden=vit.blocks[0].mlp.fc1.out_features,
            projector=(width, *[hidden] * (config.projector_layers - 1), config.head_out),
            predictor=(config.head_out, *[hidden] * (config.predictor_layers - 1), config.head_out),
            learned_embedding=not config.frozen_patch_embed, momentum=config.ema is not None,
            clipped=config.clip == "vector",
        )  # fmt: skip

    @property
    def blocks(self) -> tuple[tuple[str, int, int], ...]:
        """The products of a block: (name, width in, width out)."""
        d, m = self.width, self.hidden
        return ("qkv", d, 3 * d), ("proj", d, d), ("fc1", d, m), ("fc2", m, d)

    @property
    def last_block(self) -> tuple[tuple[str, int, int], ...]:
        """Those of the last one; all of them but that for keys and values ("kv") of the class token alone."""
        d = self.width
        return ("kv", d, 2 * d), ("q", d, d), *self.blocks[1:]

    def parameters(self) -> tuple[int, int]:
        """Weights of products that are trained, and those among them that the momentum network has too."""
        encoder = self.depth * sum(i * o for _, i, o in self.blocks)
        encoder += self.pixels * self.width * self.learned_embedding
        shared = encoder + sum(i * o for i, o in pairwise(self.projector))
        return shared + sum(i * o for i, o in pairwise(self.predictor)), shared * self.momentum


@dataclass(frozen=True)
class Operation:
    part: str  # "forward", "backward", "keys" or "update"
    name: str
    flop: float
    moved: float  # bytes


def operations(config: Config, element: int) -> list[Operation]:
    """All operations of a step, with activations of ``element`` bytes a number."""
    s, found = Sizes.of(config), []
    images, patches, all_rows = 2 * s.images, 2 * s.images * s.keep, 2 * s.images * s.tokens
    # Of each block the products and the rows that ask; the last norm is for those of the last block.
    all_blocks = [(s.blocks, all_rows)] * (s.depth - 1) + [(s.last_block, images)]

    def add(part, name, flop, elements):
        found.append(Operation(part, name, flop, elements * element))

    def product(part, name, r, i, o, beside=0):
        """``beside``: elements that pass through memory for what happens inside."""
        add(part, name, 2 * r * i * o, r * i + i * o + r * o + beside)

    def forward(part):
        product(part, "embedding", patches, s.pixels, s.width)
        for block, asking in all_blocks:
            for rows in (all_rows, asking):
                add(part, "layer norm", 0, 2 * rows * s.width)
            add(part, "attention", 4 * asking * s.tokens * s.width, 2 * (all_rows + asking) * s.width)
            for name, i, o in block:
                beside = {"proj": o, "fc2": o, "fc1": o * (part == "forward")}.get(name, 0)
                product(part, name, all_rows if name == "kv" else asking, i, o, beside * asking)
        add(part, "layer norm", 0, 2 * images * s.width)
        for head in (s.projector, s.predictor)[: 1 if part == "keys" else 2]:
            for i, o in pairwise(head):
                product(part, "heads", images, i, o)
                add(part, "batch norm", 0, 2 * images * o)

    def backward():
        if s.learned_embedding:
            product("backward", "embedding", patches, s.pixels, s.width)
        for block, asking in all_blocks:
            for rows in (all_rows, asking):
                add("backward", "layer norm", 0, 4 * rows * s.width)
            add("backward", "attention", 10 * asking * s.tokens * s.width, (4 * all_rows + 3 * asking) * s.width)
            for name, i, o in block:
                rows = all_rows if name == "kv" else asking
                product("backward", name, rows, i, o, rows * i * (name == "fc2"))  # with the derivative of GELU
                product("backward", name, rows, i, o)
        add("backward", "layer norm", 0, 3 * images * s.width)
        for i, o in (*pairwise(s.projector), *pairwise(s.predictor)):
            product("backward", "heads", images, i, o)
            product("backward", "heads", images, i, o)
            add("backward", "batch norm", 0, 3 * images * o)

    found.append(Operation("forward", "gather", 0, patches * (8 + s.pixels * (1 + element))))
    forward("forward")
    if s.momentum:
        forward("keys")
    backward()
    trained, shared = s.parameters()
    floats = (1 + 1 + 6 + 3 * s.clipped) * trained + 2 * shared
    copies = (trained + shared) * element * (element != 4)
    found.append(Operation("update", "update", 0, 4 * floats + copies))
    return found


def seconds(found: list[Operation], *, peak: float, bandwidth: float) -> float:
    """The roofline: of each operation the longer of its two times, at ``peak`` FLOP/s and ``bandwidth`` bytes/s."""
    return sum(max(operation.flop / peak, operation.moved / bandwidth) for operation in found)


def kept(config: Config, element: int) -> int:
    """Bytes that autograd keeps for the backward pass of a step that is not compiled, parameters not counted.

    Per token of a block (8D + 2M) e + 16: the inputs of both norms, their mean and deviation in float32, the inputs of
    the four products (attention's output is one, GELU's another), q, k and v, and the input of GELU. In float32, where
    attention is torch's, its H float32 sums of weights. Of the last block only (4D) e + 8 for tokens that are not the
    class token; in half precision, where its attention is plain products, queries and keys are float32, and each weight
    is kept in float32 and in half. Then the input and the output of the last norm; of the heads,
    per image, the input of every batch norm, and the output where another product follows; normalised queries and
    keys, and their similarities, in float32; a learned embedding's patches; of learned positions the patch numbers.
    Autocast on a GPU has layer norms in float32, whose inputs
    are then 4 bytes a number.
    """
    s = Sizes.of(config)
    images, patches, rows = 2 * s.images, 2 * s.images * s.keep, 2 * s.images * s.tokens
    block = (8 * s.width + 2 * s.hidden) * element + 16 + 4 * s.heads * (element == 4)
    total = rows * ((s.depth - 1) * block + 4 * s.width * element + 8)
    total += images * (block - 2 * s.width * element)  # 4D of its 8D are in the line before, 2D are the last norm's
    if element != 4:
        total += (rows + images) * s.width * (4 - element) + images * s.heads * s.tokens * (4 + element)
    for head in (s.projector, s.predictor):
        total += images * element * (2 * sum(head[1:-1]) + head[-1])
    total += images * (element * s.predictor[0] + 4 * (2 * s.predictor[-1] + s.images))
    total += patches * (s.pixels * element * s.learned_embedding + 4 * (config.position_embedding == "learned"))
    return total
