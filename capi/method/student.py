"""The student: encode the visible patches, predict hidden ones, map predictions to what the target asks for."""

from torch import Tensor, nn

from capi.models.encoder import Encoder
from capi.models.predictor import Predictor
from capi.types import Float, Int


class Student(nn.Module):
    """Encoder, predictor and head; all that the main loss trains."""

    def __init__(self, *, encoder: Encoder, predictor: Predictor, head: nn.Module) -> None:
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
        outputs: Tensor = self.head(self.predictor.predict(self.encoder, images, visible_index, predict_index))
        return outputs
