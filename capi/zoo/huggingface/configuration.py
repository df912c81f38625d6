"""`CapiConfig`: what a model is, as the library keeps it in config.json. The defaults are those of the ViT-L/14."""

from dataclasses import fields
from typing import Any

from transformers import PreTrainedConfig

from capi.models.architecture import Architecture
from capi.models.features import CapiEncoder
from capi.types import IMAGENET, Statistics
from capi.zoo.huggingface.files import MODEL_TYPE, ImageSize, check_statistics, checked_image_size, config_of

# The library makes configs without any values, to know which ones to write.
DEFAULTS: dict[str, Any] = {
    **Architecture(
        width=1024,
        depth=24,
        heads=16,
        mlp_width=4096,
        patch_size=14,
        registers=16,
        channels=3,
        positions="axial",
        grid=None,
        predictor_kind="cross",
        predictor_mask_tokens=None,
        predictor_width=1024,
        predictor_depth=12,
        predictor_heads=16,
        predictor_mlp_width=4096,
        head=None,
        outputs=None,
        head_hidden=None,
        head_bottleneck=None,
    ).as_plain(),
    "image_size": 224,
    "image_mean": list(IMAGENET.mean),
    "image_std": list(IMAGENET.std),
}


class CapiConfig(PreTrainedConfig):
    """Every value of an `Architecture`, the size of images, and the mean and deviation of their channels."""

    model_type = MODEL_TYPE
    # What these are called in configs of other models.
    attribute_map = {  # noqa: RUF012 - the library's own form
        "hidden_size": "width",
        "num_hidden_layers": "depth",
        "num_attention_heads": "heads",
        "intermediate_size": "mlp_width",
        "num_channels": "channels",
        "num_register_tokens": "registers",
    }

    def __init__(self, **values: Any) -> None:
        for name, usual in DEFAULTS.items():
            setattr(self, name, values.pop(name, usual))
        super().__init__(**values)
        architecture = self.architecture()
        checked_image_size(self.image_size, architecture.patch_size)
        check_statistics(self.image_mean, self.image_std, architecture.channels, "the config")

    @classmethod
    def from_encoder(cls, encoder: CapiEncoder, *, image_size: ImageSize) -> "CapiConfig":
        """The config of a model, for images of this size."""
        values = config_of(encoder, image_size)
        del values["model_type"]
        return cls(**values)

    def architecture(self) -> Architecture:
        """What `capi.models.architecture.build_encoder` builds from."""
        own = {field.name: getattr(self, field.name) for field in fields(Architecture)}
        return Architecture.from_plain(own, source="the config")

    def statistics(self) -> Statistics:
        """What images are normalised with."""
        return Statistics(tuple(map(float, self.image_mean)), tuple(map(float, self.image_std)))
