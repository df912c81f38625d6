"""The student: encode the visible patches, predict hidden ones, map predictions to what the target asks for."""

from torch import Tensor, nn

from capi.models.encoder import PatchEncoder
from capi.models.predictor import Predictor, hidden_index
from capi.types import Float, Int


class Student(nn.Module):
    """Encoder, predictor and head; all that the main loss trains."""

    def __init__(self, *, encoder: PatchEncoder, predictor: Predictor, head: nn.Module) -> None:
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
        predictions = self.predictor.predict(encoded, predict_index)
        outputs: Tensor = self.head(predictions)
        return outputs


class FusedStudent(Student):
    """Without a network for predictions: mask tokens, which are all that the predictor has, stand in the encoder's own
    sequence at all hidden patches.
    """

    def forward(
        self,
        images: Float[Tensor, "b c height width"],
        visible_index: Int[Tensor, "b v"],
        predict_index: Int[Tensor, "b p"],
    ) -> Float[Tensor, "b p k"]:
        hidden = hidden_index(visible_index, len(self.encoder.coordinates(images)))
        mask_tokens = self.predictor(hidden)
        encoded = self.encoder(images, visible_index, mask_tokens)
        predictions = self.predictor.predict(encoded, predict_index)
        outputs: Tensor = self.head(predictions)
        return outputs


def student_of(*, encoder: PatchEncoder, predictor: Predictor, head: nn.Module) -> Student:
    """The student that these parts make."""
    kind = FusedStudent if predictor.joins_encoder else Student
    return kind(encoder=encoder, predictor=predictor, head=head)
