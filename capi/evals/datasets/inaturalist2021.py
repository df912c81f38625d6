"""iNaturalist 2021: ten thousand species."""

from pathlib import Path

from capi.errors import CapiError, nearest
from capi.evals.datasets.files import check_count, class_folders, classification, existing_file
from capi.evals.tasks import ClassificationData, DataOptions, Dataset
from capi.runtime.documents import LIST_BYTES, read_object
from capi.runtime.image_files import refuse_outside

COUNTS = {"train": 2_686_843, "train_mini": 500_000, "val": 100_000}
SPECIES = 10_000


def load(root: Path, options: DataOptions) -> ClassificationData:
    """Trained on train or train_mini, tested on val; from the annotations where they lie, else from the folders."""
    train = options.train or next((name for name in ("train", "train_mini") if (root / name).is_dir()), "train")
    if train not in {"train", "train_mini"}:
        raise CapiError(f'train= is train or train_mini here, not "{train}"{nearest(train, COUNTS)}')
    notes: tuple[str, ...] = ()
    parts, classes = {}, None
    for split in (train, "val"):
        if (root / f"{split}.json").is_file():
            rows, classes = _annotated(root, split)
        else:
            rows = [(f"{split}/{name}", kind) for name, kind in class_folders(root / split)]
        notes += check_count(len(rows), COUNTS[split], f"images of {split}", options)
        parts[split] = (root, rows)
    data = classification(parts[train], {"val": parts["val"]}, classes, notes)
    return ClassificationData(
        data.classes, data.train, data.tests, data.notes + check_count(len(data.classes), SPECIES, "species", options)
    )


def _annotated(root: Path, split: str) -> tuple[list[tuple[str, str]], list[str]]:
    """Images with the folder of their species, sorted by name; and the species by their number."""
    path = existing_file(root / f"{split}.json")
    try:
        annotations = read_object(path, limit=LIST_BYTES)
        species = {entry["id"]: str(entry["image_dir_name"]) for entry in annotations["categories"]}
        files = {entry["id"]: str(entry["file_name"]) for entry in annotations["images"]}
        rows = sorted((files[entry["image_id"]], species[entry["category_id"]]) for entry in annotations["annotations"])
    except (KeyError, TypeError) as error:
        raise CapiError(f"{path} does not have the format of the competition ({error!r}): get it again") from error
    refuse_outside(root, [name for name, _ in rows], str(path))
    if rows and not (root / rows[0][0]).is_file():
        raise CapiError(f"{path} names {rows[0][0]}, which is not in {root}: unpack the images there")
    return rows, [species[number] for number in sorted(species)]


DATASET = Dataset(
    name="inaturalist2021",
    title="iNaturalist 2021",
    layout="""\
ROOT/train/SPECIES/*.jpg          or ROOT/train_mini/SPECIES/*.jpg
ROOT/val/SPECIES/*.jpg
ROOT/train.json, train_mini.json, val.json     the annotations (optional: else the folders are the species)

Follows the README of the competition (GitHub: visipedia/inat_comp, folder 2021): 10000 species, 2686843 images in
train, 500000 in train_mini, 100000 in val. Trained on train where it is there, else on train_mini; train= says which.
Tested on val, since the labels of the test images are not public.
""",
    classification=load,
    reads=frozenset({"train"}),
)
