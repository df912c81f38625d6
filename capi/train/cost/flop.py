"""The floating-point operations that one iteration of the method requires.

Only matrix products are counted, a multiply-add as two. What an implementation computes twice to save memory is not
counted twice, and residual branches dropped by stochastic depth are not counted at all.
"""

from typing import NamedTuple

from capi.method.student import Student
from capi.method.targets import Target
from capi.models.costs import Counts, blocks_of, is_trained, stack_flop, training_flop
from capi.models.encoder import PatchEncoder
from capi.models.heads import Head

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
    encoder, head = student.encoder, student.head
    assert isinstance(head, Head), f"the FLOP of {type(head).__name__} are not known"
    counts = Counts(encoder.num_registers, patches, visible, predicted)
    embedding = _embedding_flop(encoder, visible)
    share = blocks_of(encoder)[0].images_kept(batch_size) / batch_size
    predictor, (inner, outer) = student.predictor, student.predictor.sequences(counts)
    blocks = stack_flop(blocks_of(predictor), outer.queries, outer.read) if outer else 0
    return IterationFlop(
        teacher=encoder_flop(encoder, patches) if target.reads_teacher else 0,
        target=target.flop(counts, head),
        # Images need no gradient, so the patch embedding has one product less.
        student_encoder=share * training_flop(encoder.blocks, inner.queries, inner.read)
        + (1 + is_trained(encoder.patch_embedding)) * embedding,
        predictor=TRAINING * (share * blocks + predictor.flop_between(counts)),
        head=TRAINING * head.flop(predicted),
    )


def encoder_flop(encoder: PatchEncoder, patches: int) -> int:
    """FLOP of encoding one whole image."""
    tokens = encoder.num_registers + patches
    return _embedding_flop(encoder, patches) + stack_flop(encoder.blocks, tokens, tokens)


def _embedding_flop(encoder: PatchEncoder, patches: int) -> int:
    return 2 * patches * encoder.patch_embedding.weight.numel()
