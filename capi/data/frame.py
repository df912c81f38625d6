"""What of an image an encoder sees: its size, and the part that is kept."""

from dataclasses import dataclass

from capi.data.crops import KEPT_SHARE, centre_box
from capi.data.decoding import Box
from capi.runtime.protocol import PAPER_SIZE
from capi.types import VisionEncoder


@dataclass(frozen=True)
class Frame:
    """The size that images get, and the share of the image that is kept (None: all of it, squeezed)."""

    size: tuple[int, int]
    kept: float | None = KEPT_SHARE
    channels: int = 3

    def box(self, image_size: tuple[int, int]) -> Box:
        if self.kept is None:
            return Box(0, 0, image_size[1], image_size[0])
        return centre_box(image_size, self.size, self.kept)


def image_size_of(encoder: VisionEncoder) -> tuple[int, int]:
    """Height and width that images get where nobody asks for others: the encoder's own, else the paper's.

    Encoders of runs and of their exports have the size that they were trained at. Published models, baselines, and
    files that do not say it have none.
    """
    own: int | tuple[int, int] | None = getattr(encoder, "image_size", None)
    if own is None:
        return PAPER_SIZE
    return (own, own) if isinstance(own, int) else (own[0], own[1])
