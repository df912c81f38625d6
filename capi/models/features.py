"""Features of a trained model: the frozen encoder that classifies and segments."""

from torch import Tensor, nn

from capi.models.encoder import Encoder
from capi.models.predictor import Predictor
from capi.types import IMAGENET, Features, Float, Statistics


class CapiEncoder(nn.Module):
    """A `VisionEncoder`: calling it on normalised images gives `Features(pooled, registers, feature_map)`.

    `pooled` is the predictor's (capi/models/predictor.py): mask tokens at all positions through its first block,
    averaged; of a fused model, which has no predictor, the mean of the patches. It costs a little extra;
    `encoder(images, pooled=False)` leaves it out and puts None in its place. `statistics` are the mean and deviation
    that images are normalised with before they come here, `image_size` the height and width that they get by default:
    those of training, None where they are not known.
    """

    def __init__(
        self,
        *,
        encoder: Encoder,
        predictor: Predictor,
        head: nn.Module | None = None,
        statistics: Statistics = IMAGENET,
        image_size: tuple[int, int] | None = None,
    ) -> None:
        super().__init__()
        self.statistics = statistics
        self.image_size = image_size
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
            pooled=self.predictor.pool(self.encoder, encoded) if pooled else None,
            registers=encoded.tokens[:, : self.encoder.num_registers],
            feature_map=self.encoder.patches(encoded).unflatten(1, (rows, columns)),
        )
