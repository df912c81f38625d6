"""The explorer without its page: a folder of images, features that are computed once, and what each click shows.

An image that is looked at becomes a `View`. Meanwhile all images (some hundred, spread over the folder) are collected
in a `Library`: their feature maps, packed photos, and the patches that belong most to each prototype. What is looked
for in other images is looked for among those that are there already.
"""

import io
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor, nn

from capi.data.crops import normalize
from capi.data.decoding import Decoder
from capi.data.reader import ImageReader
from capi.data.recorded import spaced
from capi.data.sources import EncodedImages, ImageSource, find_images
from capi.errors import CapiError, counted
from capi.evals.features import Encoding, encode
from capi.method.masking import MaskSampler, PatchGrid
from capi.models.features import CapiEncoder
from capi.report.draw import Prototypes, built_in_photos
from capi.report.pictures.feature_maps import PictureFrame, SizedImages, none_readable, picture_side
from capi.report.pictures.gallery import PatchPlace, PrototypeIndex, patch_crop
from capi.report.pictures.hidden_patches import STUDENT_TEMPERATURE, HiddenPredictions, predict_hidden
from capi.report.pictures.pca import photos_of
from capi.report.pictures.sheets import printable
from capi.report.pictures.similarity import nearest_patches
from capi.runtime.cache import Cache
from capi.runtime.image_files import open_image, read_image
from capi.runtime.randomness import sample_keys
from capi.train.build import mask_sampler
from capi.types import Bool, Float, Int, VisionEncoder, statistics_of

# The images one can pick, and those that other patches are looked for in; more are left out evenly.
PICKED, SEARCHED = 48, 256
# What is kept of views, of the library's feature maps, and of photos that were unpacked.
VIEW_BYTES, LIBRARY_BYTES, PHOTO_BYTES = 2**27, 2**28, 2**26
# Patches that are kept of each prototype.
MEMBERS = 24
# The short side of a photo on the page, about.
_SHOWN_SIDE, _THUMBNAIL = 448, 128


@dataclass(frozen=True)
class View:
    """One image as it is explored; `number` is its place among the given images, None for an upload."""

    name: str
    photo: Image.Image
    image: Float[Tensor, "1 c height width"]
    feature_map: Float[Tensor, "rows columns d"]
    number: int | None = None

    @property
    def grid(self) -> tuple[int, int]:
        return self.feature_map.shape[0], self.feature_map.shape[1]

    @property
    def bytes(self) -> int:
        return self.image.nbytes + self.feature_map.nbytes + _picture_bytes(self.photo)


@dataclass
class Library:
    """What is known of the searched images by their numbers; photos are packed. It grows until it is complete."""

    maps: dict[int, Tensor] = field(default_factory=dict)
    photos: dict[int, bytes] = field(default_factory=dict)
    complete: bool = False


class Explorer:
    """A model and its images. All that a page shows comes from here; nothing here knows of a page."""

    def __init__(
        self,
        encoder: VisionEncoder,
        images: Sequence[Path] = (),
        *,
        prototypes: Prototypes | None = None,
        size: int | None = None,
        temperature: float = STUDENT_TEMPERATURE,
        masks: MaskSampler | None = None,
    ) -> None:
        if size is not None and size < 1:
            raise CapiError(f"a size of {size} pixels cannot be: give such as {picture_side(encoder)}")
        if prototypes is not None and prototypes.weight.shape[1] != encoder.width:
            raise CapiError(
                f"the encoder has width {encoder.width}, but the prototypes {prototypes.weight.shape[1]}: they are of "
                "another model"
            )
        self.encoder, self.temperature = encoder, temperature
        self.source: ImageSource = find_images(images) if images else built_in_photos()
        self.frame = PictureFrame(size or picture_side(encoder), encoder.patch_size, whole=True)
        self.masks = masks or mask_sampler()
        self.index = None if prototypes is None else PrototypeIndex(prototypes.weight, prototypes.bias, MEMBERS)
        self.failed: dict[str, str] = {}
        self._views = Cache(
            lambda number: self._made(self.source, number, number), VIEW_BYTES, weigh=lambda view: view.bytes
        )
        self._photos = Cache(
            lambda number: open_image(self.library.photos[number]).convert("RGB"), PHOTO_BYTES, weigh=_picture_bytes
        )
        self._caching = threading.Lock()
        # Decoding sets limits that belong to the whole process.
        self._reading = threading.Lock()
        # What is being added to is not read from.
        self._adding = threading.Lock()
        self._collecting = threading.Lock()
        self.library = Library()

    @property
    def missing_prototypes(self) -> str | None:
        """Why there are no prototypes to show, in one sentence."""
        if self.index is not None:
            return None
        return "This model comes without prototypes, so there are none to show: they lie in the folder of a run."

    @property
    def missing_predictions(self) -> str | None:
        """Why nothing can be predicted, in one sentence."""
        if not isinstance(self.encoder, CapiEncoder):
            return "This encoder has no predictor and no head, so it predicts nothing: that takes the folder of a run."
        if self.encoder.head is None:
            return "This model has no head, so it predicts no prototypes: that takes the folder of a run."
        if self.index is None:
            return "This model comes without prototypes, which give predictions a meaning: they lie in a run's folder."
        return None

    @property
    def searched(self) -> list[int]:
        """The numbers of the images that other patches are looked for in."""
        return spaced(len(self.source), SEARCHED)

    def facts(self) -> list[str]:
        """What is explored, in words."""
        total, searched = len(self.source), len(self.searched)
        some = counted(total, "image")
        some = some if searched == total else f"{searched} of {some}, spread evenly"
        size = f"short side {self.frame.side} px, patches of {self.frame.patch_size} px"
        return [f"{some} · {size} · features of width {self.encoder.width}"]

    def thumbnails(self) -> list[tuple[int, str, Image.Image]]:
        """Number, name and a small photo of the images one can pick; none at all is an error."""
        thumbnails = []
        for number in spaced(len(self.source), PICKED):
            try:
                thumbnails.append((number, self.name(number), self._thumbnail(number)))
            except CapiError as error:
                self.failed[self.name(number)] = str(error)
        if not thumbnails:
            raise none_readable(self.failed)
        return thumbnails

    def name(self, number: int) -> str:
        return printable(self.source.name(number))

    def view(self, number: int) -> View:
        """One of the given images; its features are computed once, as long as there is room."""
        with self._caching:
            return self._views[number]

    def opened(self, path: Path, name: str) -> View:
        """A file that somebody gave."""
        try:
            content = read_image(path)
        except OSError as error:
            raise CapiError(f"{name} cannot be read ({error.strerror or error}): give another file") from error
        return self._made(EncodedImages([name], [content]), 0, None)

    def collect(self) -> None:
        """Fill the library; what is there stays. Meant for a thread of its own."""
        with self._collecting:
            for number in [] if self.library.complete else self.searched:
                if not self._added(number):
                    break
            self.library.complete = True

    def photo(self, number: int) -> Image.Image:
        """A photo of the library."""
        with self._caching:
            return self._photos[number]

    def similar(self, view: View, patch: tuple[int, int], count: int) -> list[PatchPlace]:
        """The nearest patches of other images, one of each."""
        with self._adding:
            others = {number: feature_map for number, feature_map in self.library.maps.items() if number != view.number}
        return nearest_patches(view.feature_map[patch], others, count)

    def crop(self, place: PatchPlace, *, context: int = 1, side: int = 64) -> Image.Image:
        """A patch of the library."""
        rows, columns = self.library.maps[place.image].shape[:2]
        return patch_crop(self.photo(place.image), place, (rows, columns), context=context, side=side)

    def nearest(self, view: View) -> Int[Tensor, "rows columns"]:
        """The prototype of each patch."""
        if self.index is None:
            raise CapiError(self.missing_prototypes or "")
        return self.index.nearest(view.feature_map)

    def members(self, prototype: int, count: int, besides: int | None = None) -> list[PatchPlace]:
        """The patches of the library that belong to a prototype most, but for those of one image."""
        if self.index is None:
            raise CapiError(self.missing_prototypes or "")
        with self._adding:
            places = self.index.members(prototype)
        return [place for place in places if place.image != besides][:count]

    def progress(self) -> str:
        """How many images were searched, and whether more will be."""
        searched = len(self.library.maps)
        if self.library.complete:
            return f"{counted(searched, 'image')} searched"
        return f"{searched} of {len(self.searched)} images searched, the others are being read"

    def share(self, prototype: int) -> float:
        """The share of the library's patches that are nearest to a prototype."""
        return 0.0 if self.index is None else float(self.index.shares[prototype])

    def random_mask(self, view: View, kind: str, ratio: float, seed: int) -> Bool[Tensor, "rows columns"]:
        """Patches to hide, as a recipe would; the same for the same seed."""
        own = kind == self.masks.kind
        options = self.masks.options if own else {}
        sampler = MaskSampler(kind=kind, ratio=ratio, roll=self.masks.roll and own, predict=1.0, options=options)
        hidden = sampler(PatchGrid(*view.grid), sample_keys(seed, 0, torch.zeros(1, dtype=torch.int64))).predict[0]
        return torch.zeros(PatchGrid(*view.grid).size, dtype=torch.bool).index_fill(0, hidden, True).view(view.grid)

    def predict(self, view: View, hidden: Bool[Tensor, "rows columns"]) -> HiddenPredictions:
        """What the model predicts for hidden patches, beside the truth."""
        if self.missing_predictions is not None:
            raise CapiError(self.missing_predictions)
        assert isinstance(self.encoder, CapiEncoder)
        image = view.image.to(_device_of(self.encoder))
        return predict_hidden(self.encoder, image, hidden, self.nearest(view), temperature=self.temperature)

    def _made(self, source: ImageSource, index: int, number: int | None) -> View:
        statistics, device = statistics_of(self.encoder), _device_of(self.encoder)
        pixels = self._read(source, index, self.frame, len(statistics.mean))[None]
        encoding = Encoding(device=device)
        feature_map = encode(self.encoder, pixels, encoding).feature_map[0].cpu()
        channels = 3 if len(statistics.mean) == 1 else len(statistics.mean)
        # The short side of a photo on the page: as many pixels for each patch as come near to what is wanted.
        patches = self.frame.side // self.frame.patch_size
        shown = replace(self.frame, shown=patches * max(round(_SHOWN_SIDE / patches), 4))
        seen = self._read(source, index, shown, channels)
        photo = photos_of(seen[None])[0]
        image = normalize(pixels, statistics.mean, statistics.std)
        return View(printable(source.name(index)), photo, image, feature_map, number)

    def _read(self, source: ImageSource, index: int, frame: PictureFrame, channels: int) -> Tensor:
        with self._reading:
            image = SizedImages(source, frame, channels)[index]
        if image.failure is not None:
            raise CapiError(f"{printable(source.name(index))} is no image that can be shown: {image.failure}")
        return image.pixels

    def _thumbnail(self, number: int) -> Image.Image:
        """Small and quick, since there are many: a JPEG is not unpacked at its full size."""
        channels = len(statistics_of(self.encoder).mean)
        reader = ImageReader(self.source, Decoder(channels=3 if channels == 1 else channels, reduced=True))
        frame = PictureFrame(_THUMBNAIL, 1)
        with self._reading:
            try:
                box = frame.box(reader.size(number))
                seen = torch.from_numpy(reader.crop(number, box, (_THUMBNAIL, _THUMBNAIL)).copy())
            except Exception as error:
                raise CapiError(str(error) or type(error).__name__) from error
        return photos_of(seen[None])[0]

    def _added(self, number: int) -> bool:
        """Whether the library had room for one more image; one that cannot be read needs none."""
        try:
            view = self.view(number)
        except CapiError as error:
            self.failed[self.name(number)] = str(error)
            return True
        used = sum(feature_map.nbytes for feature_map in self.library.maps.values())
        if used + view.feature_map.nbytes > LIBRARY_BYTES:
            return False
        with self._adding:
            buffer = io.BytesIO()
            view.photo.save(buffer, "JPEG", quality=92)
            self.library.photos[number] = buffer.getvalue()
            self.library.maps[number] = view.feature_map
            if self.index is not None:
                self.index.add(number, view.feature_map)
        return True


def _device_of(encoder: VisionEncoder) -> torch.device:
    first = next(encoder.parameters(), None) if isinstance(encoder, nn.Module) else None
    return torch.device("cpu") if first is None else first.device


def _picture_bytes(picture: Image.Image) -> int:
    return picture.width * picture.height * len(picture.getbands())
