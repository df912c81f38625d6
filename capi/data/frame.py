"""What of an image an encoder sees: its size, and the part that is kept."""

from capi.runtime.protocol import PAPER_SIZE
from capi.types import VisionEncoder


def image_size_of(encoder: VisionEncoder) -> tuple[int, int]:
    """Height and width that images get where nobody asks for others: the encoder's own, else the paper's.

    Encoders of runs and of their exports have the size that they were trained at. Published models, baselines, and
    files that do not say it have none.
    """
    own: int | tuple[int, int] | None = getattr(encoder, "image_size", None)
    if own is None:
        return PAPER_SIZE
    return (own, own) if isinstance(own, int) else (own[0], own[1])
