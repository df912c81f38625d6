"""Small models and images that the tests of the explorer share."""

from pathlib import Path

import torch
from PIL import Image

from capi.models.encoder import Encoder
from capi.models.features import CapiEncoder
from capi.models.heads import LinearHead
from capi.models.predictor import CrossPredictor
from capi.report.draw import Prototypes
from tests.data.pictures import photo

PROTOTYPES = 9


def untrained_model() -> CapiEncoder:
    """Encoder, predictor and head with patches of 8 pixels."""
    torch.manual_seed(0)
    return CapiEncoder(
        encoder=Encoder(width=32, depth=1, heads=2, patch_size=8, registers=4, mlp_width=64),
        predictor=CrossPredictor(width=32, depth=1, heads=2, context_width=32, mlp_width=64),
        head=LinearHead(width=32, outputs=PROTOTYPES),
    ).eval()


def some_prototypes() -> Prototypes:
    torch.manual_seed(1)
    return Prototypes(torch.randn(PROTOTYPES, 32), torch.randn(PROTOTYPES) / 10)


def photo_folder(folder: Path, count: int = 3) -> Path:
    """A folder of soft shapes, the second one with a name that would be HTML."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        name = "<b>bold<b> & ${1 + 1}.png" if number == 1 else f"photo{number}.png"
        Image.fromarray(photo(60, 90, seed=number)).save(folder / name)
    return folder
