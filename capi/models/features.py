"""Features of a trained model: the frozen encoder that classifies and segments."""

from torch import Tensor, nn

from capi.models.encoder import Encoded, Encoder
from capi.models.heads import LinearHead
from capi.models.predictor import Predictor
from capi.types import IMAGENET, Features, Float, Statistics

# The released implementation pools after the whole first block of the predictor.
POOLING_DEPTH = 1


class CapiEncoder(nn.Module):
    """A `VisionEncoder`: calling it on normalised images gives `Features(pooled, registers, feature_map)`.

    `pooled` asks mask tokens at all positions through the predictor's first block and averages them. It costs a
    little extra; `encoder(images, pooled=False)` leaves it out and puts None in its place. `statistics` are the mean
    and deviation that images are normalised with before they come here.
    """

    def __init__(
        self,
        *,
        encoder: Encoder,
        predictor: Predictor,
        head: LinearHead | None = None,
        statistics: Statistics = IMAGENET,
    ) -> None:
        super().__init__()
        self.statistics = statistics
        self.encoder = encoder
        self.predictor = predictor
        self.head = head

    @property
    def width(self) -> int:
        return self.encoder.width

    @property
    def patch_size(self) -> int:
        return self.encoder.patch_embedding.patch_size

    def forward(self, images: Float[Tensor, "b c height width"], *, pooled: bool = True) -> Features:
        rows, columns = self.encoder.patch_embedding.grid(images)
        encoded = self.encoder(images)
        return Features(
            pooled=self._pool(encoded) if pooled else None,
            registers=encoded.tokens[:, : self.encoder.num_registers],
            feature_map=self.encoder.patches(encoded).unflatten(1, (rows, columns)),
        )

    def _pool(self, encoded: Encoded) -> Tensor:
        positions = encoded.coordinates[:, self.encoder.num_registers :]
        predictions: Tensor = self.predictor(encoded, positions, depth=POOLING_DEPTH)
        return predictions.mean(1)
