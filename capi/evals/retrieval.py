"""The images or patches of a file of features that are most like an image, or like a patch of it.

Similarity is the cosine of the features. The bank is read a part at a time, so that millions of patches need no more
memory than some hundred megabytes.
"""

import os
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from capi.data.decoding import BrokenImageError, Decoder
from capi.data.sources import Files
from capi.errors import CapiError
from capi.evals.extraction import encoder_description, features_of
from capi.evals.feature_files import TYPES, FeatureFile, Framing
from capi.evals.features import Encoding, encoded_batches, silent
from capi.evals.neighbors import NearestNeighbors
from capi.runtime.devices import float32_products
from capi.types import Features, Float, Int, VisionEncoder

# An image encoded alone and in a batch differs in its last digits: such similarities count as equal to its own.
_ROUNDING = 1e-5


@dataclass(frozen=True)
class Match:
    """An image of the file, or a patch of one, and how similar it is."""

    name: str
    number: int
    similarity: float
    label: str | None = None
    patch: tuple[int, int] | None = None
    """Row and column, where patches were searched."""
    itself: bool = False
    """Whether it is the very image, or the very patch, that was asked about."""


def find_similar(
    file: FeatureFile,
    encoder: VisionEncoder,
    image: Path,
    *,
    encoding: Encoding,
    count: int = 10,
    at: tuple[float, float] | None = None,
    kind: str | None = None,
    root: Path | None = None,
) -> list[Match]:
    """The most similar images, best first; equally similar ones in the order of the file.

    `root` is the folder of the file's images, if it is not the one that the file names.
    With a point `at` (x, y), in pixels of the image as it is seen, the patch there is compared with all patches.
    Images are framed as they were for the file, whatever the size in `encoding`.
    """
    if count < 1:
        raise CapiError(f"{count} matches cannot be shown: ask for at least 1")
    if not image.exists():
        raise CapiError(f"there is no file {image}: give the image to find similar ones of")
    if "tile" in file.facts.about:
        raise CapiError(
            f"{file.path} holds the map of one large image: search in a file of `capi extract` without --tile"
        )
    refuse_other(file, encoder)
    kind = _chosen_kind(file, kind, at)
    features = _encoded(file, encoder, image, encoding, pooled=kind == "pooled")
    if at is None:
        query, place = _vectors(features_of(features, kind).to(_dtype(file)), kind), None
    else:
        place = patch_under(image, file.facts.framing, at)
        query = features.feature_map[:, place[0], place[1]].to(_dtype(file))
    index, similarity = _most_similar(file, kind, query, count)
    matches = [_match(file, kind, *match) for match in zip(index.tolist(), similarity.tolist(), strict=True)]
    named = file.facts.root if root is None else root
    return _itself_first(matches, None if named is None else Path(named), image, place)


def refuse_other(file: FeatureFile, encoder: VisionEncoder) -> None:
    """Features are compared with features of the same encoder only."""
    expected, description = file.facts.encoder, encoder_description(encoder)
    if expected.get("width") != description["width"]:
        raise CapiError(
            f"{file.path} holds features of an encoder of width {expected.get('width')}, but this one has "
            f"{description['width']}: use the encoder that they were extracted with"
        )
    unknown = not (expected.get("fingerprint") and description["fingerprint"])
    same = [expected.get(key) == description[key] for key in ("patch_size", "statistics")]
    if not all(same) or not (unknown or expected["fingerprint"] == description["fingerprint"]):
        raise CapiError(
            f"{file.path} holds features of another encoder of the same width, which mean something else: use the "
            "encoder that they were extracted with, or extract them again"
        )


def _chosen_kind(file: FeatureFile, kind: str | None, at: tuple[float, float] | None) -> str:
    kinds = list(file.facts.shapes)
    if at is not None:
        if kind not in {None, "patch"}:
            raise CapiError(f'a point asks about a patch, but the kind is "{kind}": leave one of them out')
        if "patch" not in kinds:
            raise CapiError(f'{file.path} has no "patch" features, which a point needs: extract them')
        return "patch"
    if kind == "patch":
        raise CapiError("patches are compared with a patch: say with --at x,y, in pixels, where in the image it lies")
    # Patches have a mean, whether it was stored or not.
    usable = [name for name in kinds if name != "patch"] + ["mean_patch"] * ("patch" in kinds)
    if kind is not None and kind not in usable:
        raise CapiError(f'{file.path} has no "{kind}" features, but {", ".join(kinds)}')
    return kind or ("mean_patch" if "mean_patch" in usable else usable[0])


def _encoded(file: FeatureFile, encoder: VisionEncoder, image: Path, encoding: Encoding, *, pooled: bool) -> Features:
    framing = file.facts.framing
    encoding = replace(encoding, size=framing.size, workers=0, image_cache=None, progress=silent)
    source = Files(image.parent, [image.name])
    batch = next(encoded_batches(encoder, source, encoding, whole=framing.whole, pooled=pooled))
    pooled_vector, registers, feature_map = batch.features
    return Features(None if pooled_vector is None else pooled_vector.cpu(), registers.cpu(), feature_map.cpu())


def patch_under(image: Path, framing: Framing, at: tuple[float, float]) -> tuple[int, int]:
    """Row and column of the patch under a point (x, y), in pixels of the image as it is seen."""
    try:
        shape = Decoder(channels=framing.channels).open(image).shape
    except (BrokenImageError, OSError) as error:
        raise CapiError(f"{image} cannot be read ({error}): give another image") from error
    return framing.patch_at((shape.height, shape.width), *at)


def _dtype(file: FeatureFile) -> torch.dtype:
    """What the bank was rounded to, the query is rounded to as well: an image is then most like itself."""
    return TYPES[file.facts.dtype]


def _vectors(values: Tensor, kind: str) -> Float[Tensor, "_ _"]:
    """One row for each image, or for each patch."""
    return values.flatten(0, 2) if kind == "patch" else values.flatten(1)


def _most_similar(
    file: FeatureFile, kind: str, query: Float[Tensor, "1 d"], count: int
) -> tuple[Int[Tensor, " k"], Float[Tensor, " k"]]:
    """Numbers of the nearest rows of the bank and their similarities, best first."""
    index, similarity, first = torch.empty(0, dtype=torch.long), torch.empty(0, dtype=torch.float64), 0
    derived = kind == "mean_patch" and kind not in file.facts.shapes
    for part in file.parts("patch" if derived else kind):
        bank = part.float().mean((1, 2)) if derived else _vectors(part, kind)
        rows = _candidates(bank, query, count)
        nearest = NearestNeighbors(min(count, len(rows))).fit(bank[rows]).kneighbors(query)
        index = torch.cat([index, rows[nearest.index[0]] + first])
        similarity = torch.cat([similarity, nearest.closeness[0].double()])
        order = similarity.sort(descending=True, stable=True).indices[:count]
        index, similarity, first = index[order], similarity[order], first + len(bank)
    return index, similarity


@float32_products("highest")
def _candidates(bank: Float[Tensor, "s d"], query: Float[Tensor, "1 d"], count: int) -> Int[Tensor, " m"]:
    """Rows that may be among the most similar, in order: for one query a product in float32 rules out most of them."""
    values, direction = bank.float(), query[0].float()
    norms = torch.linalg.vector_norm(values, dim=1)
    cosine = values @ (direction / direction.norm()) / norms
    # Where float32 has no room for a square, nothing is known of the row.
    sure = cosine.isfinite() & (norms > 1e-12)
    error = 4 * (bank.shape[1] + 16) * torch.finfo(torch.float32).eps
    least = cosine.masked_fill(~sure, -torch.inf).topk(min(count, len(bank))).values[-1] - 2 * error
    return ((cosine >= least) | ~sure).nonzero()[:, 0]


def _match(file: FeatureFile, kind: str, row: int, similarity: float) -> Match:
    number, patch = row, None
    if kind == "patch":
        rows, columns = file.facts.framing.grid
        number, place = divmod(row, rows * columns)
        patch = divmod(place, columns)
    label = None if file.labels is None else file.labels[number]
    return Match(file.names[number], number, similarity, label, patch)


def _itself_first(matches: list[Match], root: Path | None, image: Path, place: tuple[int, int] | None) -> list[Match]:
    """Mark the image itself, which comes before its copies."""
    if root is None:
        return matches
    marked = [
        replace(match, itself=True) if match.patch == place and _is_same(root, match.name, image) else match
        for match in matches
    ]
    least = marked[0].similarity - _ROUNDING
    return sorted(marked, key=lambda match: not (match.itself and match.similarity >= least))


def _is_same(root: Path, name: str, image: Path) -> bool:
    if not root.is_dir():
        # Of a folder that was given by an absolute path, the file has only the name.
        return image.resolve().as_posix().endswith(f"/{(root / name).as_posix()}")
    try:
        return os.path.samefile(root / name, image)
    except OSError:
        return False
