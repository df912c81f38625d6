"""What a run shows at its end: its prototypes as strips of patches that belong to them, and nearest images.

RUN/pictures/prototypes/index.json     how many images, a note, and number, share and file of each prototype shown
RUN/pictures/prototypes/00012.png      the patches that belong to prototype 12 most, in context, the best one first
RUN/pictures/neighbours/index.json     rows of files with the cosine to the first of the row, which has none
RUN/pictures/neighbours/0_1.jpg        the image that is nearest to the first photo asked for
"""

import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from capi.data.recorded import SAMPLE, spaced
from capi.data.sources import ImageSource
from capi.errors import CapiError, counted
from capi.evals.features import Encoding
from capi.evals.limits import PartOfImages
from capi.method.teacher import Layers, Normalization, layer_tokens
from capi.models.features import CapiEncoder
from capi.report.draw import Prototypes, load_prototypes
from capi.report.pictures.feature_maps import FeatureMaps, PictureFrame, SizedImages, none_readable
from capi.report.pictures.gallery import FROM_ONE_IMAGE, PrototypeIndex, member_crops, spread_over_use
from capi.report.pictures.sheets import save_picture, strip
from capi.report.snapshots import RunFrame, photo_of, run_frame
from capi.runtime.atomic import atomic_folder
from capi.types import Features, VisionEncoder, statistics_of
from capi.zoo.run_folder import RunFolder, run_config
from capi.zoo.weights import load_run

FOLDER, INDEX = "prototypes", "index.json"
# Patches of a strip at most, and their side in pixels.
PATCHES, SIDE = 8, 64
NEIGHBORS = "neighbours"
_QUERIES, _NEAREST = 4, 5
_PHOTO_SIDE = 128


def write_gallery(
    run: Path, source: ImageSource, *, images: int = SAMPLE, prototypes: int = 24, encoding: Encoding | None = None
) -> Path:
    """Find and draw the patches of a run's prototypes among at most so many of its images; returns the folder.

    `encoding` says how the encoder is run; its size is not used, since pictures have the run's own.
    """
    encoding = encoding or Encoding()
    folder = RunFolder(run)
    config, clustered = run_config(folder), load_prototypes(run, any_layers=True)
    encoder = TargetEncoder(load_run(run).to(encoding.device), config.target.layers, config.target.normalize)
    frame = run_frame(config.data.height_and_width, encoder.patch_size)
    some = PartOfImages(source, torch.tensor(spaced(len(source), images), dtype=torch.int64))
    failed: dict[str, str] = {}
    index = index_images(encoder, clustered, some, frame, encoding, best=PATCHES, failed=failed)
    shown = spread_over_use(index.shares, prototypes)
    seen = SizedImages(some, frame, len(statistics_of(encoder).mean))
    photos = _photos(
        seen, encoding, total=len({place.image for prototype in shown for place in index.members(prototype)})
    )
    crops = member_crops(index, shown, photos, frame.grid, patches=PATCHES, side=SIDE)
    facts = _facts(index, shown, frame.grid, readable=len(some) - len(failed), failed=len(failed))
    place = folder.pictures / FOLDER
    try:
        with atomic_folder(place) as made:
            for number in shown:
                strip(crops[number], side=SIDE).save(made / _file(number), format="PNG")
            (made / INDEX).write_text(json.dumps(facts, indent=1), encoding="utf-8")
    except OSError as error:
        raise CapiError(f"{place} cannot be written ({error.strerror or error})") from error
    return place


class TargetEncoder:
    """A `VisionEncoder` whose feature map is what a run's targets are made from."""

    def __init__(self, encoder: CapiEncoder, layers: Layers, normalize: Normalization) -> None:
        self.encoder, self.layers, self.normalize = encoder, layers, normalize
        self.width, self.patch_size = encoder.width, encoder.patch_size
        self.statistics, self.image_size = encoder.statistics, encoder.image_size

    def __call__(self, images: Tensor, *, pooled: bool = True) -> Features:  # noqa: ARG002 - nobody asks for it
        rows, columns = self.encoder.encoder.patch_embedding.grid(images)
        tokens = layer_tokens(self.encoder.encoder, images, self.layers, self.normalize)
        return Features(None, tokens[:, :0], tokens.unflatten(1, (rows, columns)))


def write_neighbors(run: Path, source: ImageSource, *, images: int = SAMPLE, encoding: Encoding | None = None) -> Path:
    """Draw a few images and those that are nearest to each by the cosine of their mean patch feature."""
    encoding = encoding or Encoding()
    folder, encoder = RunFolder(run), load_run(run).to(encoding.device)
    height, width = run_config(folder).data.height_and_width
    frame = RunFrame(min(height, width), encoder.patch_size, height_and_width=(height, width))
    some = PartOfImages(source, torch.tensor(spaced(len(source), images), dtype=torch.int64))
    maps = FeatureMaps(encoder, some, frame, encoding, "nearest images", 0)
    means = {number: feature_map.flatten(0, 1).float().mean(0) for number, feature_map in maps}
    if len(means) < 2:
        raise CapiError("fewer than two images can be read, so there are no nearest images: give others")
    numbers = list(means)
    vectors = F.normalize(torch.stack(list(means.values())), dim=1)
    place = folder.pictures / NEIGHBORS
    seen, rows = SizedImages(some, frame, len(statistics_of(encoder).mean)), list[list[dict[str, Any]]]()
    with atomic_folder(place) as made:
        for query in spaced(len(numbers), _QUERIES):
            cosines = vectors @ vectors[query]
            cosines[query] = 2.0
            nearest = cosines.topk(min(_NEAREST + 1, len(numbers)))
            row = []
            pairs = zip(nearest.indices.tolist(), nearest.values.tolist(), strict=True)
            for rank, (position, cosine) in enumerate(pairs):
                name = f"{len(rows)}_{rank}.jpg"
                save_picture(photo_of(seen, numbers[position], _PHOTO_SIDE), made / name)
                row.append({"file": name, "cosine": cosine if rank else None})
            rows.append(row)
        (made / INDEX).write_text(json.dumps(rows, indent=1), encoding="utf-8")
    return place


def index_images(
    encoder: VisionEncoder,
    prototypes: Prototypes,
    source: ImageSource,
    frame: PictureFrame,
    encoding: Encoding,
    *,
    best: int = 16,
    failed: dict[str, str] | None = None,
) -> PrototypeIndex:
    """The best patches of each prototype among all images of a source; `failed` gets the others, and why.

    The encoder is on the device that `encoding` names.
    """
    failed = {} if failed is None else failed
    device = encoding.device
    bias = None if prototypes.bias is None else prototypes.bias.to(device)
    index = PrototypeIndex(prototypes.weight.to(device), bias, best)
    # Each map is looked at once, so none is kept.
    for number, feature_map in FeatureMaps(encoder, source, frame, encoding, "prototypes", 0, failed):
        index.add(number, feature_map)
    if not index.seen:
        raise none_readable(failed)
    return index


def _photos(images: SizedImages, encoding: Encoding, total: int) -> Callable[[int], Image.Image]:
    """Photos by number, as large as the strips show them; the progress gets their number."""
    height, width = images.frame.size((1, 1))
    patches = min(height, width) // images.frame.patch_size
    done = itertools.count(1)

    def read(number: int) -> Image.Image:
        photo = photo_of(images, number, round(patches * SIDE / 3))
        encoding.progress("photos", next(done), total)
        return photo

    return read


def _facts(
    index: PrototypeIndex, shown: Sequence[int], grid: tuple[int, int], *, readable: int, failed: int
) -> dict[str, Any]:
    """What the index file holds."""
    shares = index.shares.tolist()
    used = sum(share > 0 for share in shares)
    left_out = f" {failed} more could not be read." if failed else ""
    note = (
        f"Of {len(shares)} prototypes, {used} are the nearest one of any patch of {counted(readable, 'image')}, each "
        "of "
        f"{grid[0]} x {grid[1]} patches.{left_out} Shown are {len(shown)} of them, spread evenly from the most to the "
        "least used: the patches that are closest to each, outlined, with what is around them; at most "
        f"{FROM_ONE_IMAGE} patches of one image."
    )
    listed = [{"number": number, "share": shares[number], "file": _file(number)} for number in shown]
    return {"images": readable, "note": note, "prototypes": listed}


def _file(number: int) -> str:
    return f"{number:05d}.png"
