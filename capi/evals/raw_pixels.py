"""k-NN on the pixels of whole images: the baseline that needs no encoder, given every chance."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from capi.data.crops import Frame
from capi.evals.features import Encoding
from capi.evals.fitted_probes import vote_confidences
from capi.evals.images import StillBatches, read_in_order
from capi.evals.metrics import answered_accuracy
from capi.evals.neighbors import Distance, NearestNeighbors
from capi.evals.tasks import AnsweredImages, LabeledImages

# What raw pixels are tried at: the baseline takes whichever is best for it.
SIDES = (4, 8, 16, 32)
DISTANCES: tuple[Distance, ...] = ("cosine", "l2")


def raw_pixel_accuracies(
    train: LabeledImages, test: AnsweredImages, encoding: Encoding, neighbors: int = 1
) -> dict[str, float]:
    """Accuracy on the test images, for several sizes and distances."""
    pixels = []
    for images in (train.images, test.images):
        batches = StillBatches(images, Frame(encoding.size), torch.arange(len(images)), encoding.batch_size)
        read = read_in_order(batches, range(len(batches)), workers=encoding.workers)
        pixels.append(torch.cat([batch.images for batch in read]))
    return dict(_accuracies(pixels[0], train.labels, pixels[1], test, neighbors))


def _accuracies(
    train: Tensor, labels: Tensor, test: Tensor, answered: AnsweredImages, neighbors: int
) -> Iterator[tuple[str, float]]:
    classes = int(labels.max()) + 1 if answered.answer_of_class is None else len(answered.answer_of_class)
    for side in SIDES:
        small = [F.interpolate(pixels.float(), size=(side, side), mode="area").flatten(1) for pixels in (train, test)]
        center = small[0].mean(0)
        for distance in DISTANCES:
            nearest = NearestNeighbors(neighbors, distance).fit(small[0] - center).kneighbors(small[1] - center)
            votes = vote_confidences(
                labels[nearest.index],
                nearest.closeness,
                neighbors=neighbors,
                classes=classes,
                vote="majority",
                temperature=1.0,
            )
            score = answered_accuracy(votes, answered.answers, answered.answer_of_class, answered.restricted)
            yield f"{side} px, {distance}", score
