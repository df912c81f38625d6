"""The student: encode the visible patches, predict the hidden ones, map predictions to prototype logits."""

from torch import Tensor, nn

from capi.models.encoder import Encoder
from capi.models.heads import LinearHead
from capi.models.predictor import Predictor
from capi.models.rope import patch_coordinates
from capi.types import Float, Int


class Student(nn.Module):
    """Encoder, predictor and head; all that the main loss trains."""

    def __init__(self, *, encoder: Encoder, predictor: Predictor, head: LinearHead) -> None:
        super().__init__()
        self.encoder = encoder
        self.predictor = predictor
        self.head = head

    def forward(
        self,
        images: Float[Tensor, "b c height width"],
        visible_index: Int[Tensor, "b v"],
        predict_index: Int[Tensor, "b p"],
    ) -> Float[Tensor, "b p k"]:
        encoded = self.encoder(images, visible_index)
        grid = self.encoder.patch_embedding.grid(images)
        positions = patch_coordinates(*grid, device=images.device)[predict_index]
        logits: Tensor = self.head(self.predictor(encoded, positions))
        return logits
