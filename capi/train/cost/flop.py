"""The floating-point operations that one iteration of the method requires.

Only matrix products are counted, a multiply-add as two. What an implementation computes twice to save memory is not
counted twice, and residual branches dropped by stochastic depth are not counted at all.
"""

from typing import NamedTuple

from torch import nn

from capi.method.clustering import OnlineClustering
from capi.method.ema_head import EmaHead
from capi.method.student import Student
from capi.method.targets import Target
from capi.models.encoder import PatchEncoder
from capi.models.layers import Block
from capi.models.predictor import CrossPredictor, FusedPredictor, Predictor, SelfPredictor

# A backward pass computes two products for each one of the forward pass: for the weights and for the inputs.
TRAINING = 3


class IterationFlop(NamedTuple):
    """FLOP for one image, part by part."""

    teacher: float
    target: float
    student_encoder: float
    predictor: float
    head: float
    # An image's share of the one update of its batch.
    optimizer: float = 0.0


def iteration_flop(
    student: Student, target: Target, *, batch_size: int, patches: int, visible: int, predicted: int
) -> IterationFlop:
    """FLOP of one image of a batch, of whose `patches` so many are visible and so many predicted.

    A frozen encoder's are not counted: what it computes is not known.
    """
    encoder = student.encoder
    counts = Counts(encoder.num_registers, patches, visible, predicted)
    embedding = _embedding_flop(encoder, visible)
    # The share of the images that stochastic depth leaves in a block.
    block = encoder.blocks[0]
    assert isinstance(block, Block)
    kept = block.images_kept(batch_size) / batch_size
    tokens, predictor = _predictor_flop(student.predictor, counts, kept)
    return IterationFlop(
        teacher=encoder_flop(encoder, patches) if target.reads_teacher else 0,
        target=_target_flop(target, student.head, counts),
        # Images need no gradient, so the patch embedding has one product less.
        student_encoder=TRAINING * kept * _stack_flop(encoder.blocks, tokens, tokens) + 2 * embedding,
        predictor=TRAINING * predictor,
        head=TRAINING * head_flop(student.head, predicted),
    )


class Counts(NamedTuple):
    """Tokens of one image."""

    registers: int
    patches: int
    visible: int
    predicted: int

    @property
    def context(self) -> int:
        return self.registers + self.visible


def _predictor_flop(predictor: Predictor, counts: Counts, kept: float) -> tuple[int, float]:
    """How many tokens the student's encoder works on, and the forward FLOP of the predictor."""
    context = counts.context
    if isinstance(predictor, CrossPredictor):
        return context, kept * _stack_flop(predictor.blocks, counts.predicted, context)
    if isinstance(predictor, SelfPredictor):
        everywhere = predictor.mask_tokens == "masked"
        tokens = context + (counts.patches - counts.visible if everywhere else counts.predicted)
        projected = 2 * context * sum(weight.numel() for weight in predictor.projection.parameters())
        return context, kept * _stack_flop(predictor.blocks, tokens, tokens) + projected
    assert isinstance(predictor, FusedPredictor), f"the FLOP of {type(predictor).__name__} are not known"
    return counts.registers + counts.patches, 0.0


def _target_flop(target: Target, head: nn.Module, counts: Counts) -> int:
    """Prototypes have logits and a gradient; an averaged head has logits; other targets have no products.

    A queue's tokens have logits, so many batches of them for each batch.
    """
    if isinstance(target, OnlineClustering):
        products = 2 if target.queue is None else 2 + target.queue.shape.batches
        return 2 * products * counts.patches * target.prototypes.numel()
    return head_flop(head, counts.predicted) if isinstance(target, EmaHead) else 0


def head_flop(head: nn.Module, tokens: int) -> int:
    """FLOP of the map from so many predictions to logits or values; a learned length is no matrix product."""
    matrices = {name: weight for name, weight in head.named_parameters() if weight.ndim == 2}
    return 2 * tokens * sum(weight.numel() for name, weight in matrices.items() if not name.endswith("length"))


def encoder_flop(encoder: PatchEncoder, patches: int) -> int:
    """FLOP of encoding one whole image."""
    tokens = encoder.num_registers + patches
    return _embedding_flop(encoder, patches) + _stack_flop(encoder.blocks, tokens, tokens)


def _embedding_flop(encoder: PatchEncoder, patches: int) -> int:
    return 2 * patches * encoder.patch_embedding.weight.numel()


def _stack_flop(blocks: nn.ModuleList, queries: int, context: int) -> int:
    return sum(_block_flop(block, queries, context) for block in blocks if isinstance(block, Block))


def _block_flop(block: Block, queries: int, context: int) -> int:
    attention, mlp = block.attention, block.mlp
    on_queries = (attention.query, attention.output, mlp.expand, mlp.contract)
    on_context = (attention.key, attention.value)
    linear = queries * sum(layer.weight.numel() for layer in on_queries)
    linear += context * sum(layer.weight.numel() for layer in on_context)
    products = 2 * queries * context * attention.query.out_features
    return 2 * (linear + products)
