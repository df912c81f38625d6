"""The classes that the transformers library opens a folder with; importing them needs the library.

`CapiConfig` is what a model is, as the library writes it to config.json; the defaults are those of the ViT-L/14.
`CapiModel` is an encoder as the library calls one, from `pixel_values` to a `ModelOutput`. `CapiImageProcessor` frames
and normalizes images as our own evaluation does: it uses the functions of `capi.data`, with Pillow and without
torchvision. The middle of an image is cut out and resized in one step, which other processors do in two with rounding
between.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.feature_extraction_utils import BatchFeature
from transformers.image_processing_backends import PilBackend
from transformers.image_utils import ChannelDimension, SizeDict, infer_channel_dimension_format
from transformers.processing_utils import ImagesKwargs
from transformers.utils import ModelOutput

from capi.data.crops import KEPT_SHARE, center_box, normalize
from capi.data.decoding import (
    Box,
    BrokenImageError,
    Decoded,
    Decoder,
    PillowPicture,
    Pixels,
    array_pixels,
    as_array,
    resize,
)
from capi.errors import CapiError
from capi.models.architecture import Architecture, build_encoder
from capi.models.features import CapiEncoder
from capi.models.positions import AxialPositions
from capi.types import IMAGENET, Float, Statistics
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
        positions=AxialPositions.kind,
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
    """Every value of an `Architecture`, the size of images, and the mean and std of their channels."""

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


@dataclass
class CapiOutput(ModelOutput):
    """Features under the names of the library."""

    last_hidden_state: Float[Tensor, "b t d"] | None = None
    """Registers, then patches row by row."""
    pooler_output: Float[Tensor, "b e"] | None = None
    """One vector for each image, of the predictor's width."""
    feature_map: Float[Tensor, "b rows columns d"] | None = None
    """The patches again, where they stand."""
    hidden_states: tuple[Tensor, ...] | None = None
    """Where asked for: what goes into the first block, then what comes out of each, before the final norm."""


class CapiModel(PreTrainedModel):
    """A `CapiEncoder` under the attribute `model`, with the library's ways of loading, saving and sharing."""

    config_class = CapiConfig
    base_model_prefix = "capi"
    main_input_name = "pixel_values"
    input_modalities = ("image",)
    _no_split_modules = ["Block"]  # noqa: RUF012 - the library's own form
    _supports_sdpa = True

    def __init__(self, config: CapiConfig) -> None:
        super().__init__(config)
        size = checked_image_size(config.image_size, config.patch_size)
        self.model = build_encoder(config.architecture(), config.statistics(), size)
        self.post_init()

    @classmethod
    def from_encoder(cls, encoder: CapiEncoder, *, image_size: ImageSize) -> "CapiModel":
        """A model around this encoder, sharing its weights."""
        with torch.device("meta"):
            made = cls(CapiConfig.from_encoder(encoder, image_size=image_size))
        made.model = encoder
        return made.eval()

    def forward(
        self,
        pixel_values: Float[Tensor, "b c height width"] | None = None,
        *,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        return_dict: bool | None = None,
    ) -> CapiOutput | tuple[Any, ...]:
        if pixel_values is None:
            raise CapiError("a CAPI model needs pixel_values: images normalised by its image processor")
        if output_attentions or self.config.output_attentions:
            raise CapiError("a CAPI model gives no attentions: its attention is computed without them")
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        with _recorded(self.model.encoder.blocks, wanted=bool(output_hidden_states)) as hidden_states:
            features = self.model(pixel_values.to(self.dtype))
        patches = features.feature_map.flatten(1, 2)
        output = CapiOutput(
            last_hidden_state=torch.cat([features.registers, patches], dim=1),
            pooler_output=features.pooled,
            feature_map=features.feature_map,
            hidden_states=tuple(hidden_states) if output_hidden_states else None,
        )
        if return_dict is None:
            return_dict = self.config.return_dict
        return output if return_dict else output.to_tuple()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """As the modules begin themselves; the library asks it of what a file did not hold."""
        # Maps of torch's own class begin with the head that they belong to.
        begin = getattr(module, "reset_parameters", None)
        if begin is not None and type(module) is not nn.Linear:
            begin()


@contextmanager
def _recorded(blocks: nn.ModuleList, *, wanted: bool) -> Iterator[list[Tensor]]:
    """The tokens before the first block and after each, filled in while the encoder runs inside."""
    states: list[Tensor] = []
    if not wanted:
        yield states
        return
    handles = [blocks[0].register_forward_pre_hook(lambda _, inputs: states.append(inputs[0]))]
    handles += [block.register_forward_hook(lambda _, __, output: states.append(output)) for block in blocks]
    try:
        yield states
    finally:
        for handle in handles:
            handle.remove()


RESCALE_FACTOR = 1 / 255


class CapiImageProcessorKwargs(ImagesKwargs, total=False):  # type: ignore[call-arg]
    """What this processor knows beyond the others."""

    kept_share: float | None
    patch_size: int | None


class CapiImageProcessor(PilBackend):
    """Images to `pixel_values`.

    `size` (height and width) is that of the result. `do_center_crop` keeps the middle: `kept_share` of the largest part
    of that aspect; without it the whole image is squeezed. Without `do_resize` images stay as they are. Images of
    Pillow are turned as their EXIF tag says, and laid on white where they are transparent. Arrays and tensors are
    scaled by their dtype, as `capi.transform` does: uint8 from 0 to 255, uint16 and other integers from 0 to 65535,
    floats from 0 to 1, bool as black and white. Without `do_rescale` their values stay as they are.
    """

    valid_kwargs = CapiImageProcessorKwargs
    model_input_names = ["pixel_values"]  # noqa: RUF012 - the library's own form

    do_resize = True
    size = {"height": 224, "width": 224}  # noqa: RUF012 - the library's own form
    resample = Image.Resampling.BICUBIC
    do_center_crop = True
    kept_share = KEPT_SHARE
    do_rescale = True
    rescale_factor = RESCALE_FACTOR
    do_normalize = True
    image_mean = IMAGENET.mean
    image_std = IMAGENET.std
    patch_size: int | None = None

    def _validate_preprocess_kwargs(self, **kwargs: Any) -> None:
        """What cannot be done is refused, not left out."""
        if kwargs.get("resample") not in (None, Image.Resampling.BICUBIC):
            raise CapiError("a CAPI image processor resizes bicubically (resample=3) and in no other way")
        if kwargs.get("do_pad"):
            raise CapiError("a CAPI image processor does not pad: it resizes all images to one size")
        if kwargs.get("do_resize"):
            _check_size(kwargs.get("size"), kwargs.get("patch_size"))
        mean, std = kwargs.get("image_mean"), kwargs.get("image_std")
        check_statistics(mean, std, len(mean) if isinstance(mean, tuple) else 3, "the image processor")
        share = kwargs.get("kept_share")
        if share is None or not 0 < share <= 1:
            raise CapiError(f"kept_share is {share}: expected a part of the image, above 0 and at most 1")

    def process_image(self, image: Any, input_data_format: Any = None, **kwargs: Any) -> Decoded:
        """One image as Pillow's L or RGB, or as an array (height, width) or (height, width, channels)."""
        channels = len(kwargs["image_mean"])
        if isinstance(image, Image.Image):
            return _guarded(PillowPicture(Decoder(channels=channels), image).load)
        values = as_array(image)
        if values.ndim == 3:
            axes = input_data_format or infer_channel_dimension_format(values, num_channels=(1, 3, channels))
            values = np.moveaxis(values, 0, -1) if axes == ChannelDimension.FIRST else values
        if kwargs["do_rescale"]:
            return np.ascontiguousarray(_guarded(array_pixels, values, channels))
        return np.ascontiguousarray(values[..., 0] if values.ndim == 3 and values.shape[-1] == 1 else values)

    def _prepare_images_structure(self, images: Any, expected_ndims: int = 3) -> Any:
        """Grey images without an axis of channels are images too."""
        listed = list(images) if isinstance(images, list | tuple) else [images]
        if any(isinstance(image, np.ndarray | torch.Tensor) and image.ndim == 2 for image in listed):
            return listed
        return super()._prepare_images_structure(images, expected_ndims)

    def _preprocess(
        self,
        images: list[Decoded],
        *,
        do_resize: bool,
        size: SizeDict,
        do_center_crop: bool,
        kept_share: float,
        image_mean: tuple[float, ...],
        return_tensors: Any,
        **kwargs: Any,
    ) -> BatchFeature:
        framed = []
        for image in images:
            height, width = (image.height, image.width) if isinstance(image, Image.Image) else image.shape[:2]
            target = (size.height, size.width) if do_resize else (height, width)
            middle = do_resize and do_center_crop
            box = center_box((height, width), target, kept_share) if middle else Box(0, 0, width, height)
            pixels = _guarded(resize, image, box, target, len(image_mean))
            framed.append(self._scaled(pixels, image_mean=image_mean, **kwargs))
        return BatchFeature(data={"pixel_values": framed}, tensor_type=return_tensors)

    def _scaled(
        self,
        pixels: Pixels,
        *,
        do_rescale: bool,
        rescale_factor: float,
        do_normalize: bool,
        image_mean: tuple[float, ...],
        image_std: tuple[float, ...],
        **_: Any,
    ) -> Pixels:
        """Rescale and normalize by our own arithmetic where both are wanted as usual, so that not one bit differs."""
        if do_rescale and do_normalize and rescale_factor == RESCALE_FACTOR:
            return normalize(torch.from_numpy(np.array(pixels))[None], image_mean, image_std)[0].numpy()
        values = pixels.astype(np.float32)
        values = values * np.float32(rescale_factor) if do_rescale else values
        if not do_normalize:
            return values
        mean, std = (np.asarray(part, dtype=np.float32)[:, None, None] for part in (image_mean, image_std))
        return (values - mean) / std


def _check_size(size: SizeDict | None, patch_size: int | None) -> None:
    if size is None or not size.height or not size.width:
        raise CapiError(f'size is {size}: expected {{"height": ..., "width": ...}} of what comes out')
    if patch_size and (size.height % patch_size or size.width % patch_size):
        raise CapiError(
            f"a size of {size.height} x {size.width} is no multiple of the model's patch size {patch_size} both ways"
        )


def _guarded(step: Any, *arguments: Any) -> Any:
    try:
        return step(*arguments)
    except BrokenImageError as error:
        raise CapiError(f"an image cannot be used: {error}") from error
