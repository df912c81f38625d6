"""What the parts of a model cost: the FLOP of a stack of blocks, and the memory that it leaves for its backward pass.

Heads and predictors know from these what they cost themselves; `capi.train.cost` adds up.

What autograd keeps follows from the modules: the input of every norm and every linear map, what attention and GELU need
of their own, and with stochastic depth the branches as they are added back. The residual stream and the norms are in
float32; what products read and give is in the precision of the run. The counts are those of eager mode: a compiled
block keeps less.

    c   bytes of a value in the run's precision: 4 or 2
    q   tokens that ask, t tokens that are read (the same in self-attention), d width, m width of the hidden layer
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from torch import nn

from capi.models.layers import TransformerBlock
from capi.models.low_rank import LowRank
from capi.models.plain_vit import PlainBlock

# The residual stream, norms, losses and Sinkhorn; and indices; and what is rounded.
FLOAT32, INT64, BFLOAT16 = 4, 8, 2
# When in an iteration a part of the memory is there: throughout, or in one of four phases.
ALWAYS, TEACHER, CLUSTERING, STUDENT, UPDATE = "always", "teacher", "clustering", "student", "update"
PHASES = (TEACHER, CLUSTERING, STUDENT, UPDATE)
Checkpointing = Literal["off", "full", "selective"]


class Counts(NamedTuple):
    """Tokens of one image."""

    registers: int
    patches: int
    visible: int
    predicted: int

    @property
    def context(self) -> int:
        return self.registers + self.visible

    @property
    def masked(self) -> int:
        return self.patches - self.visible


class MemoryPart(NamedTuple):
    """A part of the memory, in bytes, and the phase that it belongs to."""

    name: str
    bytes: int
    phase: str


class Workload(NamedTuple):
    """What one process computes in an iteration: so many images over all its micro-batches.

    Without `bounded` everything that is computed in slices is computed at once.
    """

    images: int
    micro_batches: int = 1
    accelerator: bool = True
    bounded: bool = True

    @property
    def micro_batch(self) -> int:
        """The images of the largest micro-batch."""
        return -(-self.images // self.micro_batches)


class TokenSequence(NamedTuple):
    """The tokens of one image that a stack of blocks works on; with a context attention reads that."""

    queries: int
    context: int | None = None

    @property
    def read(self) -> int:
        return self.queries if self.context is None else self.context


@dataclass(frozen=True)
class ActivationPolicy:
    """Which tensors a forward pass saves for the backward pass.

    `compute_bytes` of a value that products read and give. `checkpointing` full keeps the input of each block and
    recomputes the rest; selective keeps the products of each block and recomputes norms, rotations and GELUs.
    """

    compute_bytes: int = FLOAT32
    checkpointing: Checkpointing = "off"

    @property
    def mixed(self) -> bool:
        return self.compute_bytes != FLOAT32


def stack_flop(blocks: Iterable[Any], queries: int, context: int) -> int:
    """The forward pass of a row of blocks on one image, of so many tokens that ask and so many that are read."""
    return sum(_block_flop(block, queries, context) for block in blocks if isinstance(block, TransformerBlock))


def training_flop(blocks: Iterable[Any], queries: int, context: int) -> int:
    """Forward and backward pass of such a row. A matrix that is not trained has no gradient, and what comes before all
    that is trained has no backward pass."""
    total, reached = 0, False
    for block in blocks:
        reached = reached or is_trained(block)
        total += _block_flop(block, queries, context)
        if reached:
            total += _block_flop(block, queries, context) + _block_flop(block, queries, context, trained=True)
    return total


def is_trained(module: Any) -> bool:
    """Whether any of its parameters is."""
    return any(parameter.requires_grad for parameter in module.parameters())


def _block_flop(block: TransformerBlock, queries: int, context: int, *, trained: bool = False) -> int:
    """FLOP of one pass; with `trained` those of matrices that are trained alone, and of attention."""
    attention = block.attention
    linear = queries * sum(_values(layer, trained) for layer in (attention.query, attention.output, *maps_of(block)))
    linear += context * sum(_values(layer, trained) for layer in (attention.key, attention.value))
    products = 2 * queries * context * attention.query.out_features
    return 2 * (linear + products)


def _values(layer: nn.Linear, trained: bool) -> int:
    """Numbers in the matrices of a map: its own, and those that LoRA puts beside it."""
    return sum(each.numel() for each in layer.parameters() if each.ndim == 2 and (each.requires_grad or not trained))


def maps_of(block: TransformerBlock) -> list[nn.Linear]:
    """The linear maps of its MLP."""
    return [layer for layer in block.mlp.children() if isinstance(layer, nn.Linear)]


def blocks_of(stack: object) -> list[TransformerBlock]:
    """The blocks of an encoder or a predictor, all alike."""
    return [block for block in getattr(stack, "blocks", ()) if isinstance(block, TransformerBlock)]


def kept_blocks(stack: object) -> list[TransformerBlock]:
    """The blocks that leave something for the backward pass: not those before all that is trained."""
    blocks = blocks_of(stack)
    first = next((number for number, block in enumerate(blocks) if is_trained(block)), len(blocks) - 1)
    return blocks[first:]


def stack_bytes(stack: Any, sequence: TokenSequence, images: int, policy: ActivationPolicy) -> int:
    """A row of blocks and the norm at its end."""
    blocks = kept_blocks(stack)
    rotary = _rotary_bytes(blocks[0], sequence) if getattr(stack.positions, "rotates", False) else 0
    # All blocks of a stack are alike.
    each = len(blocks) * _block_bytes(blocks[0], sequence, images, policy, rotary)
    tables_once = policy.checkpointing != "off" or not (policy.mixed or drops(blocks[0]))
    width = blocks[0].attention.query.out_features
    # Of the norm; other methods' encoders have it or not.
    last = 0 if getattr(stack, "final_norm", stack) is None else FLOAT32 * sequence.queries * (width + 1)
    return each + images * (last + (rotary if tables_once else 0))


def _rotary_bytes(block: TransformerBlock, sequence: TokenSequence) -> int:
    """Cosines and sines of one image in float32, of what asks and of what is read."""
    head_width = block.attention.query.out_features // block.attention.heads
    positions = sequence.queries + (sequence.context or 0)
    return 2 * FLOAT32 * positions * head_width


def drops(block: TransformerBlock) -> bool:
    """Whether it leaves out images, as stochastic depth does."""
    return block.drop_rate > 0


def _block_bytes(
    block: TransformerBlock, sequence: TokenSequence, images: int, policy: ActivationPolicy, rotary: int
) -> int:
    if policy.checkpointing == "full":
        return FLOAT32 * images * sequence.queries * block.attention.query.out_features
    if policy.checkpointing == "selective":
        return _block_products(block, sequence, images, policy)
    if isinstance(block, PlainBlock):
        return images * _plain_branches(block, sequence, policy)
    running = block.images_kept(images) if drops(block) else images
    # Both branches draw images of their own; the storage of the permutation is kept whole.
    drawn = 2 * INT64 * images if drops(block) else 0
    return drawn + running * (
        _attention(block, sequence, policy) + _mlp(block, sequence, policy) + _turned(block, sequence, policy, rotary)
    )


def _plain_branches(block: PlainBlock, sequence: TokenSequence, policy: ActivationPolicy) -> int:
    """One image of another method's block: norms with their statistics, inputs of maps, and what lies between.

    What a map that is not trained reads is not kept, unless LoRA reads it.
    """
    q, c, attention = sequence.queries, policy.compute_bytes, block.attention
    d, m = attention.query.out_features, block.mlp.expand.out_features
    norms = 2 * FLOAT32 * q * (d + 2)
    maps = maps_of(block)
    # Rounding makes a copy for each map and each matrix of LoRA that reads it; in float32 they share one.
    readers = [(attention.query, attention.key, attention.value), tuple(maps[:-1])]
    reads = [sum(any(w.requires_grad for w in layer.parameters()) for layer in each) for each in readers]
    inputs = c * q * d * sum(count if policy.mixed else min(count, 1) for count in reads)
    attended = c * d * 4 * q + FLOAT32 * attention.heads * q
    # Before and after the GELU; with a gate its map, what SiLU gives, the other map, and their product.
    hidden = c * q * m * (2 if block.mlp.gate is None else 4)
    scaled = 2 * c * q * d if block.attention_scale is not None and block.attention_scale.requires_grad else 0
    thin = sum(c * q * layer.down.shape[0] for layer in block.modules() if isinstance(layer, LowRank))
    return norms + inputs + attended + hidden + scaled + thin


def _attention(block: TransformerBlock, sequence: TokenSequence, policy: ActivationPolicy) -> int:
    """One image: its norm, the inputs of the linear maps, queries, keys, values, the result and its normaliser."""
    q, t, c = sequence.queries, sequence.read, policy.compute_bytes
    d, e = block.attention.query.out_features, block.attention.key.in_features
    norm = FLOAT32 * q * (d + 1)
    cross = sequence.context is not None
    # Rounding makes a copy for each of the three maps; in float32 they share one.
    inputs = c * q * d * (3 if policy.mixed and not cross else 1)
    if cross and policy.mixed:
        inputs += 2 * c * t * e
    elif cross and drops(block):
        inputs += c * t * e
    attended = c * d * (2 * q + 2 * t) + FLOAT32 * block.attention.heads * q
    added = FLOAT32 * q * d if drops(block) else 0
    return norm + inputs + attended + added


def _mlp(block: TransformerBlock, sequence: TokenSequence, policy: ActivationPolicy) -> int:
    """One image: the norm, its result, and the hidden layer before and after its GELU."""
    q, c = sequence.queries, policy.compute_bytes
    d, m = block.mlp.expand.in_features, block.mlp.expand.out_features
    norm = FLOAT32 * q * (d + 1)
    return norm + c * q * (d + 2 * m) + (FLOAT32 * q * d if drops(block) else 0)


def _turned(block: TransformerBlock, sequence: TokenSequence, policy: ActivationPolicy, rotary: int) -> int:
    """One image: the rotary tables that a block keeps for itself, rounded or of the images that it works on."""
    if policy.mixed:
        # Queries and keys each round the tables, also where they are the same.
        both = rotary if sequence.context is not None else 2 * rotary
        return both * policy.compute_bytes // FLOAT32
    return rotary if drops(block) else 0


def _block_products(block: TransformerBlock, sequence: TokenSequence, images: int, policy: ActivationPolicy) -> int:
    """Selective checkpointing: the block's input and what its products give."""
    q, t, c = sequence.queries, sequence.read, policy.compute_bytes
    d, m = block.attention.query.out_features, block.mlp.expand.out_features
    running = block.images_kept(images) if drops(block) else images
    # Queries, keys and values, attention, its output, and both layers of the MLP.
    products = c * (d * (4 * q + 2 * t) + m * q) + FLOAT32 * block.attention.heads * q
    return images * FLOAT32 * q * d + running * products


def recomputed_bytes(block: TransformerBlock, sequence: TokenSequence, images: int, policy: ActivationPolicy) -> int:
    """What one block holds again while its backward pass runs."""
    if policy.checkpointing == "off":
        return 0
    everything = ActivationPolicy(policy.compute_bytes)
    rotary = _rotary_bytes(block, sequence)
    again = _block_bytes(block, sequence, images, everything, rotary) + weight_copies(block, everything)
    saved = _block_bytes(block, sequence, images, policy, rotary) if policy.checkpointing == "selective" else 0
    return max(again - saved, 0)


def weight_copies(block: TransformerBlock, policy: ActivationPolicy) -> int:
    """Bytes of the rounded copies of all matrices, which stay until the backward pass in mixed precision."""
    if not policy.mixed or policy.checkpointing != "off":
        return 0
    attention = block.attention
    layers = (attention.query, attention.key, attention.value, attention.output, *maps_of(block))
    return policy.compute_bytes * sum(layer.in_features * layer.out_features for layer in layers)
