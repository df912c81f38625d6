"""The memory that the student's forward pass leaves for its backward pass, as its parts know it."""

from typing import NamedTuple

from capi.method.student import Student
from capi.models.costs import (
    ActivationPolicy,
    Counts,
    blocks_of,
    is_trained,
    kept_blocks,
    recomputed_bytes,
    stack_bytes,
    weight_copies,
)
from capi.models.heads import Head


class Activations(NamedTuple):
    """Bytes, part by part. What is recomputed is what one block needs again while its backward pass runs."""

    encoder: int
    predictor: int
    head: int
    weight_copies: int
    recomputed_encoder: int
    recomputed_predictor: int


def student_activations(student: Student, counts: Counts, images: int, policy: ActivationPolicy) -> Activations:
    """What one forward pass of the student over so many images keeps, its loss included."""
    encoder, predictor, head = student.encoder, student.predictor, student.head
    assert isinstance(head, Head), f"what {type(head).__name__} keeps is not known"
    inner, outer = predictor.sequences(counts)
    stacks = [(kept_blocks(encoder), inner), *([(kept_blocks(predictor), outer)] if outer else [])]
    # Of one image: its patches as rows, which the embedding's gradient reads.
    embedded = policy.compute_bytes * counts.visible * encoder.patch_embedding.weight[0].numel()
    embedded *= is_trained(encoder.patch_embedding)
    between = predictor.bytes_between(counts, encoder.width, policy)
    return Activations(
        encoder=embedded * images + stack_bytes(encoder, inner, images, policy),
        predictor=between * images + (stack_bytes(predictor, outer, images, policy) if outer else 0),
        head=head.activation_bytes(counts.predicted * images, policy),
        weight_copies=sum(len(blocks) * weight_copies(blocks[0], policy) for blocks, _ in stacks),
        recomputed_encoder=recomputed_bytes(blocks_of(encoder)[0], inner, images, policy),
        recomputed_predictor=recomputed_bytes(blocks_of(predictor)[0], outer, images, policy) if outer else 0,
    )
