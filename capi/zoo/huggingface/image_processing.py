"""`CapiImageProcessor`: images as our own evaluation frames and normalises them, in the library's dress.

It uses the functions of `capi.data`, with Pillow and without torchvision. The middle of an image is cut out and
resized in one step, which other processors do in two with rounding between.
"""

from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers.feature_extraction_utils import BatchFeature
from transformers.image_processing_backends import PilBackend
from transformers.image_utils import ChannelDimension, SizeDict, infer_channel_dimension_format
from transformers.processing_utils import ImagesKwargs

from capi.data.crops import KEPT_SHARE, centre_box, normalize
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
from capi.types import IMAGENET
from capi.zoo.huggingface.files import check_statistics

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
            known = input_data_format or infer_channel_dimension_format(values, num_channels=(1, 3, channels))
            values = np.moveaxis(values, 0, -1) if known == ChannelDimension.FIRST else values
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
            box = centre_box((height, width), target, kept_share) if middle else Box(0, 0, width, height)
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
        """With our own arithmetic where both steps are wanted as usual, so that not one bit differs."""
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
