"""The memory that the student's forward pass leaves for its backward pass, counted tensor by tensor.

What autograd keeps follows from the modules: the input of every norm and every linear map, what attention and GELU need
of their own, and with stochastic depth the branches as they are added back. The residual stream and the norms are in
float32; what products read and give is in the precision of the run. The counts are those of eager mode: a compiled
block keeps less.

    c   bytes of a value in the run's precision: 4 or 2
    q   tokens that ask, t tokens that are read (the same in self-attention), d width, m width of the hidden layer
"""

from dataclasses import dataclass
from typing import NamedTuple

from torch import nn

from capi.method.student import Student
from capi.models.encoder import PatchEncoder
from capi.models.heads import LinearHead, LinearMap, MlpHead
from capi.models.layers import Block
from capi.models.predictor import CrossPredictor, FusedPredictor, SelfPredictor, SplitPredictor
from capi.train.cost.flop import Counts
from capi.train.recomputation import Recomputation

# The residual stream, norms, losses and Sinkhorn; and indices.
FLOAT32, INT64 = 4, 8


@dataclass(frozen=True)
class Keeping:
    """How tensors are kept.

    `compute_bytes` of a value that products read and give. `checkpointing` full keeps the input of each block and
    recomputes the rest; selective keeps the products of each block and recomputes norms, rotations and GELUs.
    """

    compute_bytes: int = FLOAT32
    checkpointing: Recomputation = "off"

    @property
    def mixed(self) -> bool:
        return self.compute_bytes != FLOAT32


class Activations(NamedTuple):
    """Bytes, part by part. `recomputed` is what one block needs again while its backward pass runs."""

    encoder: int
    predictor: int
    head: int
    weight_copies: int
    recomputed: int


class Sequence(NamedTuple):
    """The tokens of one image that a stack of blocks works on; with a context attention reads that."""

    queries: int
    context: int | None = None

    @property
    def read(self) -> int:
        return self.queries if self.context is None else self.context


def student_activations(student: Student, counts: Counts, images: int, keeping: Keeping) -> Activations:
    """What one forward pass of the student over so many images keeps, its loss included."""
    encoder, predictor = student.encoder, student.predictor
    inner, outer = _sequences(student, counts)
    stacks = [(_blocks(encoder), inner), *([(_blocks(predictor), outer)] if outer else [])]
    own = _stack(predictor, outer, images, keeping) if outer and isinstance(predictor, SplitPredictor) else 0
    # Of one image: its patches as rows, which the gradient of the embedding reads.
    embedded = keeping.compute_bytes * counts.visible * encoder.patch_embedding.weight[0].numel()
    return Activations(
        encoder=embedded * images + _stack(encoder, inner, images, keeping),
        predictor=_between(student, counts, keeping) * images + own,
        head=head_bytes(student.head, counts.predicted * images, keeping),
        weight_copies=sum(len(blocks) * _weight_copies(blocks[0], keeping) for blocks, _ in stacks),
        recomputed=max(_recomputed(blocks[0], sequence, images, keeping) for blocks, sequence in stacks),
    )


def _sequences(student: Student, counts: Counts) -> tuple[Sequence, Sequence | None]:
    """What the encoder's blocks and the predictor's work on; a fused predictor has no blocks."""
    predictor, context = student.predictor, counts.context
    if isinstance(predictor, CrossPredictor):
        return Sequence(context), Sequence(counts.predicted, context)
    if isinstance(predictor, SelfPredictor):
        everywhere = predictor.mask_tokens == "masked"
        return Sequence(context), Sequence(
            context + (counts.patches - counts.visible if everywhere else counts.predicted)
        )
    assert isinstance(predictor, FusedPredictor), f"what {type(predictor).__name__} keeps is not known"
    return Sequence(counts.registers + counts.patches), None


def _blocks(stack: object) -> list[Block]:
    return [block for block in getattr(stack, "blocks", ()) if isinstance(block, Block)]


def _between(student: Student, counts: Counts, keeping: Keeping) -> int:
    """Of one image: what the predictor keeps outside of its blocks."""
    predictor, width = student.predictor, student.encoder.width
    masked = counts.patches - counts.visible
    chosen = INT64 * counts.predicted
    if isinstance(predictor, CrossPredictor):
        return _read_by_blocks(predictor, counts, width, keeping)
    if isinstance(predictor, SelfPredictor):
        mapped = not isinstance(predictor.projection, nn.Identity)
        read = keeping.compute_bytes * counts.context * width if mapped else 0
        return read + (FLOAT32 * masked * predictor.width + chosen if predictor.mask_tokens == "masked" else 0)
    return FLOAT32 * (counts.registers + counts.patches) * width + chosen


def _read_by_blocks(predictor: CrossPredictor, counts: Counts, width: int, keeping: Keeping) -> int:
    """The encoder's output, which all blocks read; and less the input of the first one, which is one mask token."""
    dropping, off = _drops(_blocks(predictor)[0]), keeping.checkpointing == "off"
    # Where blocks take images out of it, or round it, they keep copies of their own.
    read = 0 if off and (keeping.mixed or dropping) else FLOAT32 * counts.context * width
    copied = (off and dropping) or not _rotates(predictor)
    return read - (0 if copied else FLOAT32 * counts.predicted * predictor.width)


def _stack(stack: PatchEncoder | SplitPredictor, sequence: Sequence, images: int, keeping: Keeping) -> int:
    """A row of blocks and the norm at its end."""
    blocks = _blocks(stack)
    rotary = _rotary_bytes(blocks[0], sequence) if _rotates(stack) else 0
    # All blocks of a stack are alike.
    each = len(blocks) * _block(blocks[0], sequence, images, keeping, rotary)
    tables_once = keeping.checkpointing != "off" or not (keeping.mixed or _drops(blocks[0]))
    width = blocks[0].attention.query.out_features
    last = FLOAT32 * sequence.queries * (width + 1)
    return each + images * (last + (rotary if tables_once else 0))


def _rotates(stack: PatchEncoder | SplitPredictor) -> bool:
    return stack.positions.kind != "learned"


def _rotary_bytes(block: Block, sequence: Sequence) -> int:
    """Cosines and sines of one image in float32, of what asks and of what is read."""
    head_width = block.attention.query.out_features // block.attention.heads
    positions = sequence.queries + (sequence.context or 0)
    return 2 * FLOAT32 * positions * head_width


def _drops(block: Block) -> bool:
    return block.drop_rate > 0


def _block(block: Block, sequence: Sequence, images: int, keeping: Keeping, rotary: int) -> int:
    if keeping.checkpointing == "full":
        return FLOAT32 * images * sequence.queries * block.attention.query.out_features
    if keeping.checkpointing == "selective":
        return _block_products(block, sequence, images, keeping)
    kept = block.images_kept(images) if _drops(block) else images
    # Both branches draw images of their own; the storage of the permutation is kept whole.
    drawn = 2 * INT64 * images if _drops(block) else 0
    return drawn + kept * (
        _attention(block, sequence, keeping)
        + _mlp(block, sequence, keeping)
        + _turned(block, sequence, keeping, rotary)
    )


def _attention(block: Block, sequence: Sequence, keeping: Keeping) -> int:
    """One image: its norm, the inputs of the linear maps, queries, keys, values, the result and its normaliser."""
    q, t, c = sequence.queries, sequence.read, keeping.compute_bytes
    d, e = block.attention.query.out_features, block.attention.key.in_features
    norm = FLOAT32 * q * (d + 1)
    cross = sequence.context is not None
    # Rounding makes a copy for each of the three maps; in float32 they share one.
    inputs = c * q * d * (3 if keeping.mixed and not cross else 1)
    if cross and keeping.mixed:
        inputs += 2 * c * t * e
    elif cross and _drops(block):
        inputs += c * t * e
    attended = c * d * (2 * q + 2 * t) + FLOAT32 * block.attention.heads * q
    added = FLOAT32 * q * d if _drops(block) else 0
    return norm + inputs + attended + added


def _mlp(block: Block, sequence: Sequence, keeping: Keeping) -> int:
    """One image: the norm, its result, and the hidden layer before and after its GELU."""
    q, c = sequence.queries, keeping.compute_bytes
    d, m = block.mlp.expand.in_features, block.mlp.expand.out_features
    norm = FLOAT32 * q * (d + 1)
    return norm + c * q * (d + 2 * m) + (FLOAT32 * q * d if _drops(block) else 0)


def _turned(block: Block, sequence: Sequence, keeping: Keeping, rotary: int) -> int:
    """One image: the rotary tables that a block keeps for itself, rounded or of the images that it works on."""
    if keeping.mixed:
        # Queries and keys each round the tables, also where they are the same.
        both = rotary if sequence.context is not None else 2 * rotary
        return both * keeping.compute_bytes // FLOAT32
    return rotary if _drops(block) else 0


def _block_products(block: Block, sequence: Sequence, images: int, keeping: Keeping) -> int:
    """Selective checkpointing: the block's input and what its products give."""
    q, t, c = sequence.queries, sequence.read, keeping.compute_bytes
    d, m = block.attention.query.out_features, block.mlp.expand.out_features
    kept = block.images_kept(images) if _drops(block) else images
    # Queries, keys and values, attention, its output, and both layers of the MLP.
    products = c * (d * (4 * q + 2 * t) + m * q) + FLOAT32 * block.attention.heads * q
    return images * FLOAT32 * q * d + kept * products


def _recomputed(block: Block, sequence: Sequence, images: int, keeping: Keeping) -> int:
    """What one block holds again while its backward pass runs."""
    if keeping.checkpointing == "off":
        return 0
    everything = Keeping(keeping.compute_bytes)
    rotary = _rotary_bytes(block, sequence)
    again = _block(block, sequence, images, everything, rotary) + _weight_copies(block, everything)
    kept = _block(block, sequence, images, keeping, rotary) if keeping.checkpointing == "selective" else 0
    return max(again - kept, 0)


def _weight_copies(block: Block, keeping: Keeping) -> int:
    """In mixed precision a rounded copy of every matrix stays until the backward pass."""
    if not keeping.mixed or keeping.checkpointing != "off":
        return 0
    attention, mlp = block.attention, block.mlp
    layers = (attention.query, attention.key, attention.value, attention.output, mlp.expand, mlp.contract)
    return keeping.compute_bytes * sum(layer.in_features * layer.out_features for layer in layers)


def head_bytes(head: nn.Module, predictions: int, keeping: Keeping) -> int:
    """The head, and the loss to targets that are in float32 as well as what it compares them with."""
    c = keeping.compute_bytes
    if isinstance(head, MlpHead):
        first = head.layers[0]
        assert isinstance(first, nn.Linear)
        layers = c * predictions * (first.in_features + 4 * first.out_features)
        copies = c * sum(w.numel() for w in head.layers.parameters() if w.ndim == 2) if keeping.mixed else 0
        return layers + copies + _linear_head(head.last, predictions, keeping, c)
    if isinstance(head, LinearHead):
        return _linear_head(head, predictions, keeping, FLOAT32)
    assert isinstance(head, LinearMap), f"what {type(head).__name__} keeps is not known"
    outputs, width = head.weight.shape
    copy = c * head.weight.numel() if keeping.mixed else 0
    return predictions * (c * width + 2 * FLOAT32 * outputs) + copy


def _linear_head(head: LinearHead, predictions: int, keeping: Keeping, given: int) -> int:
    """Predictions as they are given and normalised, the weight as its lengths make it, and the loss."""
    prototypes, width = head.direction.shape
    normed = predictions * (width * (given + keeping.compute_bytes) + 2 * FLOAT32)
    weight = prototypes * (keeping.compute_bytes * width + 3 * FLOAT32)
    return normed + weight + predictions * 2 * FLOAT32 * prototypes
