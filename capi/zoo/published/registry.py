"""The models that the authors of CAPI published, by name: plain facts, from their repository.

The addresses, the licence, the data and the two scores are those of the README of facebookresearch/capi. Not known:
the sizes and checksums of the files, which are recorded when a file is first used (capi/zoo/published/cache.py).
"""

import difflib
from collections.abc import Iterable
from dataclasses import dataclass

REFERENCE_REPOSITORY = "https://github.com/facebookresearch/capi"
_ADDRESS = "https://dl.fbaipublicfiles.com/capi/"


@dataclass(frozen=True)
class ReleasedModel:
    """One file, and what is known of it."""

    name: str
    data: str
    """What it was trained on, without labels."""
    address: str
    scores: dict[str, float]
    """As its authors report them, in percent."""
    architecture: str = "ViT-L"
    patch_size: int = 14
    # Of the encoder alone; the file also holds the predictor and the head.
    parameters: int = 302_658_560
    licence: str = "Apache-2.0"
    verified: str = "layout checked against reference tensors; the file itself was not opened"

    @property
    def file(self) -> str:
        """What the file is called, also in the cache."""
        return self.address.rsplit("/", 1)[-1]


def _scores(ade20k: float, imagenet: float) -> dict[str, float]:
    return {"ADE20K, k-NN, mIoU": ade20k, "ImageNet-1k, attentive probe, accuracy": imagenet}


_MODELS = (
    ReleasedModel("capi_vitl14_lvd", "LVD-142M", f"{_ADDRESS}capi_vitl14_lvd.pth", _scores(32.1, 83.8)),
    ReleasedModel("capi_vitl14_p205", "Places205", f"{_ADDRESS}capi_vitl14_p205.pth", _scores(35.2, 79.2)),
    # This file is not called what the model is called.
    ReleasedModel("capi_vitl14_in22k", "ImageNet-22k", f"{_ADDRESS}capi_vitl14_i22k.pth", _scores(29.7, 83.6)),
    ReleasedModel("capi_vitl14_in1k", "ImageNet-1k", f"{_ADDRESS}capi_vitl14_in1k.pth", _scores(29.2, 82.9)),
)
RELEASED: dict[str, ReleasedModel] = {model.name: model for model in _MODELS}


def list_models() -> list[ReleasedModel]:
    """What can be loaded by name, in the order to show it."""
    return list(RELEASED.values())


def similar_names(name: str, others: Iterable[str] = ()) -> str:
    """` (did you mean "x" or "y"?)` for the closest names, or an empty string when nothing is close."""
    matches = difflib.get_close_matches(name, [*RELEASED, *others], n=3, cutoff=0.7)
    quoted = " or ".join(f'"{match}"' for match in matches)
    return f" (did you mean {quoted}?)" if matches else ""
