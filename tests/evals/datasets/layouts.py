"""Tiny copies of the layout of every data set, with pixels that tell the classes apart."""

import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from capi.evals.datasets.records import BINARIES, Name
from capi.evals.tasks import AnsweredImages, DataOptions

SIZE = 8
Labels = npt.NDArray[np.uint8]


@dataclass
class Tree:
    """Files that are written at once, in reverse order of their names unless `forwards`."""

    forwards: bool = False
    files: dict[str, bytes] = field(default_factory=dict)

    def text(self, name: str, lines: Sequence[str]) -> None:
        """A list; its lines are turned around with the files."""
        ordered = sorted(lines) if self.forwards else sorted(lines, reverse=True)
        self.files[name] = ("\n".join(ordered) + "\n").encode()

    def exact(self, name: str, text: str) -> None:
        self.files[name] = text.encode()

    def photo(self, name: str, kind: int) -> None:
        """A photo of a class."""
        self.files[name] = photo(np.full((SIZE, SIZE), kind, np.uint8), name)

    def scene(self, image: str, mask: str, labels: Labels, stored: Labels | None = None, palette: bool = True) -> None:
        """A photo whose pixels have the colours of their labels, and its mask."""
        self.files[image] = photo(labels, image)
        self.files[mask] = mask_bytes(labels if stored is None else stored, palette=palette)

    def write(self, root: Path) -> None:
        for name in sorted(self.files, reverse=not self.forwards):
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_bytes(self.files[name])


def photo(labels: Labels, name: str) -> bytes:
    """A colour for each label, with grain that depends on the name."""
    random = np.random.default_rng(sum(name.encode()))
    colors = np.random.default_rng(5).integers(40, 216, (256, 3))
    pixels = colors[labels] + random.integers(-12, 13, (*labels.shape, 3))
    return encoded(Image.fromarray(pixels.astype(np.uint8)), "PNG" if name.endswith("png") else "JPEG")


def mask_bytes(labels: Labels, *, palette: bool) -> bytes:
    """A mask as PNG; its palette, if any, has colours that tell nothing of the labels."""
    image = Image.fromarray(labels)
    if palette:
        image.putpalette([value for index in range(256) for value in (255 - index, index * 7 % 256, 13)])
    return encoded(image, "PNG")


def encoded(image: Image.Image, kind: str) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind)
    return buffer.getvalue()


def halves(left: int, right: int, void: int | None = None) -> Labels:
    """Two labels side by side, and a stripe of void between them."""
    labels = np.full((SIZE, SIZE), left, np.uint8)
    labels[:, SIZE // 2 :] = right
    if void is not None:
        labels[:, SIZE // 2] = void
    return labels


def build_folder(root: Path, forwards: bool = False) -> DataOptions:
    tree = Tree(forwards)
    for kind, name in enumerate(["ant", "bee", "cat"]):
        for number in range(6):
            tree.photo(f"train/{name}/{number}.png", kind)
        for number in range(2):
            tree.photo(f"val/{name}/deep/{number}.jpg", kind)
    tree.write(root)
    return DataOptions(verify_counts=False)


def build_csv(root: Path, forwards: bool = False) -> DataOptions:
    tree = Tree(forwards)
    rows = []
    for number in range(18):
        split, kind = ("test", number % 3) if number % 3 == number % 6 else ("train", number % 3)
        tree.scene(f"photos/{number}.png", f"labels/{number}.png", halves(kind, (kind + 1) % 3, 255))
        rows.append(f"photos/{number}.png,labels/{number}.png,{split},{['ant', 'bee', 'cat'][kind]}")
    ordered = rows if forwards else rows[::-1]
    tree.exact("table.csv", "\n".join(["file,mask,split,label", *ordered]) + "\n")
    tree.write(root)
    return DataOptions(verify_counts=False)


def build_masks(root: Path, forwards: bool = False) -> DataOptions:
    tree = Tree(forwards)
    for number in range(12):
        name = f"town {number % 2}/{number}"
        tree.scene(f"images/train/{name}.jpg", f"masks/train/{name}.png", halves(number % 3, 2, 255))
        if number < 4:
            tree.scene(f"images/val/{name}.png", f"masks/val/{name}.png", halves(number % 3, 1), palette=False)
    tree.write(root)
    return DataOptions(verify_counts=False, ignored=frozenset({255}))


def build_demo(_: Path, __: bool = False) -> DataOptions:
    return DataOptions()


def build_pets(root: Path, forwards: bool = False) -> DataOptions:
    tree = Tree(forwards)
    lists: dict[str, list[str]] = {"trainval": [], "test": []}
    for breed, (name, species) in enumerate([("Birman", 1), ("Abyssinian", 1), ("pug", 2)], start=1):
        for number in range(8):
            photo_name = f"{name}_{number}"
            lists["trainval" if number < 6 else "test"].append(f"{photo_name} {breed} {species} 1")
            labels, trimap = halves(0, species, 255), halves(2, 1, 3)
            tree.scene(f"images/{photo_name}.jpg", f"annotations/trimaps/{photo_name}.png", labels, trimap)
    for split, lines in lists.items():
        tree.text(f"annotations/{split}.txt", lines)
    tree.write(root)
    return DataOptions(verify_counts=False)


def build_voc(root: Path, forwards: bool = False) -> DataOptions:
    """SBD's lists name images of VOC's val list too; SBD has masks for all, which differ from VOC's."""
    tree, home, sbd = Tree(forwards), "VOCdevkit/VOC2012", "sbd/benchmark_RELEASE/dataset"
    names = [f"2008_{number:06d}" for number in range(18)]
    own, val, extra = names[:4], names[4:8], names[8:]
    for index, name in enumerate(names):
        labels = halves(index % 3, 20, 255)
        tree.scene(f"{home}/JPEGImages/{name}.jpg", f"{home}/SegmentationClass/{name}.png", labels)
        if name in extra:
            del tree.files[f"{home}/SegmentationClass/{name}.png"]
        tree.files[f"{sbd}/cls/{name}.mat"] = sbd_mask(halves(index % 3, 20) if name in extra else halves(15, 15))
    tree.text(f"{home}/ImageSets/Segmentation/train.txt", own)
    tree.text(f"{home}/ImageSets/Segmentation/val.txt", val)
    tree.text(f"{sbd}/train.txt", [own[0], val[0], *extra[:5]])
    tree.text(f"{sbd}/val.txt", [own[1], val[1], *extra[5:]])
    tree.write(root)
    return DataOptions(verify_counts=False, more={"sbd": root / "sbd"})


def sbd_mask(labels: Labels) -> bytes:
    import scipy.io

    buffer = io.BytesIO()
    scipy.io.savemat(buffer, {"GTcls": {"Segmentation": labels, "CategoriesPresent": [1]}})
    return buffer.getvalue()


def build_ade20k(root: Path, forwards: bool = False) -> DataOptions:
    tree = Tree(forwards)
    for split, short, count in [("training", "train", 12), ("validation", "val", 4)]:
        for number in range(1, count + 1):
            name = f"{split}/ADE_{short}_{number:08d}"
            tree.scene(f"images/{name}.jpg", f"annotations/{name}.png", halves(1 + number % 3, 150, 0), palette=False)
    tree.write(root)
    return DataOptions(verify_counts=False)


def build_cityscapes(root: Path, forwards: bool = False) -> DataOptions:
    tree = Tree(forwards)
    for split, city, count in [("train", "ulm", 7), ("train", "aachen", 5), ("val", "bonn", 4)]:
        for number in range(count):
            place = f"{split}/{city}/{city}_{number:06d}_000019"
            image, mask = f"leftImg8bit/{place}_leftImg8bit.png", f"gtFine/{place}_gtFine_labelIds.png"
            tree.scene(image, mask, halves(0, 18, 255), halves(7, 33, 4), palette=False)
            tree.files[mask.replace("labelIds", "color")] = tree.files[image]
    tree.write(root)
    return DataOptions(verify_counts=False)


def build_camvid(root: Path, forwards: bool = False) -> DataOptions:
    tree = Tree(forwards)
    for split, count in [("train", 12), ("val", 3), ("test", 4)]:
        for number in range(count):
            name = f"{len(split)}E5_{number:05d}.png"
            tree.scene(f"{split}/{name}", f"{split}annot/{name}", halves(number % 3, 10, 11), palette=False)
    tree.write(root)
    return DataOptions(verify_counts=False)


WNIDS = [f"n{number:08d}" for number in range(100, 112)]
# Numbers of the development kit, in another order than those of the sorted ids.
KIT = {wnid: 1 + (index * 5) % 12 for index, wnid in enumerate(WNIDS)}
REAL = [[0], [1, 7], [], [3]] + [[number % 12] for number in range(4, 24)]


def answers_by_name(test: AnsweredImages) -> dict[str, set[int]]:
    """The classes that are right for each image of a test."""
    rows = ((Path(test.images.name(index)).name, set(row.tolist()) - {-1}) for index, row in enumerate(test.answers))
    return dict(rows)


def val_name(number: int) -> str:
    """The name of a validation image of ImageNet."""
    return f"ILSVRC2012_val_{number:08d}.JPEG"


def build_imagenet(root: Path, forwards: bool = False) -> DataOptions:
    """Twelve classes, so that the folders 0, 1, 10, 11, 2 of V2 come in another order as text."""
    tree = Tree(forwards)
    tree.text("LOC_synset_mapping.txt", [f"{wnid} thing {index}, stuff" for index, wnid in enumerate(WNIDS)])
    for kind, wnid in enumerate(WNIDS):
        for number in range(4):
            tree.photo(f"train/{wnid}/{wnid}_{number}.JPEG", kind)
        for number in (kind + 1, kind + 13):
            tree.photo(f"val/{wnid}/{val_name(number)}", kind)
        tree.photo(f"v2/{kind}/a.jpeg", kind)
        tree.photo(f"sketch/{wnid}/sketch.JPEG", kind)
        if kind in {2, 5}:
            tree.photo(f"a/{wnid}/0.1_mushroom.jpg", kind)
        if kind in {3, 11}:
            tree.photo(f"r/{wnid}/art_0.jpg", kind)
    tree.exact("real.json", json.dumps(REAL))
    add_objectnet(tree)
    tree.write(root)
    names = {"real": "real.json", "v2": "v2", "a": "a", "r": "r", "sketch": "sketch", "objectnet": "objectnet"}
    return DataOptions(verify_counts=False, more={name: root / path for name, path in names.items()})


def add_objectnet(tree: Tree) -> None:
    """A clock is either of two classes, a chair one; ImageNet has no spoon."""
    tree.exact(
        "objectnet/mappings/folder_to_objectnet_label.json",
        json.dumps({"clock_folder": "Clock", "chair_folder": "Chair", "spoon_folder": "Spoon"}),
    )
    tree.exact(
        "objectnet/mappings/objectnet_to_imagenet_1k.json",
        json.dumps({"Chair": "thing 9, stuff", "Clock": "thing 1, stuff; thing 4, stuff"}),
    )
    order = sorted(WNIDS, key=KIT.__getitem__)
    lines = [f"thing {WNIDS.index(wnid)}, stuff" for wnid in order]
    tree.exact("objectnet/mappings/imagenet_to_label_2012_v2", "\n".join(lines) + "\n")
    to_kit = {str(index): KIT[wnid] - 1 for index, wnid in enumerate(WNIDS)}
    tree.exact("objectnet/mappings/pytorch_to_imagenet_2012_id.json", json.dumps(to_kit))
    for folder, kind in [("clock_folder", 4), ("chair_folder", 9), ("spoon_folder", 0)]:
        pixels = np.asarray(Image.open(io.BytesIO(photo(np.full((SIZE, SIZE), kind, np.uint8), folder + ".png"))))
        framed = np.pad(pixels, ((2, 2), (2, 2), (0, 0)))
        framed[[0, 1, -2, -1], :, 0] = framed[:, [0, 1, -2, -1], 0] = 255
        tree.files[f"objectnet/images/{folder}/a.png"] = encoded(Image.fromarray(framed), "PNG")


def build_imagenet22k(root: Path, forwards: bool = False) -> DataOptions:
    tree = Tree(forwards)
    held_out = []
    for kind, wnid in enumerate(["n00000002", "n00000001", "n00000003"]):
        for number in range(6):
            tree.photo(f"{wnid}/{wnid}_{number}.JPEG", kind)
        held_out += [f"{wnid}/{wnid}_0.JPEG", f"{wnid}/{wnid}_5.JPEG"]
    tree.text("lists/test.txt", held_out)
    tree.write(root)
    return DataOptions(verify_counts=False, more={"test": root / "lists" / "test.txt"})


def build_inaturalist2021(root: Path, forwards: bool = False) -> DataOptions:
    """Numbers of the annotations run against the order of the names of files."""
    tree = Tree(forwards)
    species = ["00000_Animalia_bee", "00001_Plantae_oak", "00002_Animalia_ant"]
    categories = [{"id": number, "image_dir_name": name, "name": name[6:]} for number, name in enumerate(species)]
    for split, count in [("train_mini", 4), ("val", 2)]:
        images: list[dict[str, Any]] = []
        annotations: list[dict[str, Any]] = []
        for kind, name in enumerate(species):
            for number in range(count):
                file = f"{split}/{name}/{9 - number}.jpg"
                tree.photo(file, kind)
                identity = len(images) * (1 if forwards else -1) + 100
                images.append({"id": identity, "file_name": file})
                annotations.append({"id": identity, "image_id": identity, "category_id": kind})
        content = {"categories": categories[::-1], "images": images, "annotations": annotations[::-1]}
        tree.exact(f"{split}.json", json.dumps(content))
    tree.write(root)
    return DataOptions(verify_counts=False)


def build_places205(root: Path, forwards: bool = False) -> DataOptions:
    """Class numbers run against the order of the folders."""
    tree = Tree(forwards)
    lists: dict[str, list[str]] = {"train": [], "val": []}
    for number, folder in enumerate(["z/zoo", "a/abbey", "a/alley/indoor"]):
        for index in range(6):
            tree.photo(f"data/vision/torralba/deeplearning/images256/{folder}/gsun_{index}.jpg", number)
            lists["train" if index < 4 else "val"].append(f"{folder}/gsun_{index}.jpg {number}")
    for split, lines in lists.items():
        tree.text(f"trainvalsplit_places205/{split}_places205.csv", lines)
    tree.write(root)
    return DataOptions(verify_counts=False)


def build_sun397(root: Path, forwards: bool = False) -> DataOptions:
    tree = Tree(forwards)
    lists: dict[str, list[str]] = {"Training_01": [], "Testing_01": [], "Training_02": []}
    folders = ["a/abbey", "a/apartment_building/outdoor", "z/zoo"]
    for kind, folder in enumerate(folders):
        for number in range(6):
            tree.photo(f"{folder}/sun_{number}.jpg", kind)
            lists["Training_01" if number < 4 else "Testing_01"].append(f"/{folder}/sun_{number}.jpg")
            lists["Training_02"].append(f"/{folder}/sun_{number}.jpg")
    for name, lines in lists.items():
        tree.text(f"Partitions/{name}.txt", lines)
    tree.exact("ClassName.txt", "".join(f"/{folder}\n" for folder in folders))
    tree.write(root)
    return DataOptions(verify_counts=False)


Builder = Callable[..., DataOptions]


def build_imagenette(root: Path, forwards: bool = False) -> DataOptions:
    tree = Tree(forwards)
    for kind, wnid in enumerate(["n02102040", "n01440764", "n03888257"]):
        for number in range(6):
            split = "train" if number < 4 else "val"
            tree.photo(f"imagenette2-160/{split}/{wnid}/{wnid}_{number}.JPEG", kind)
    tree.write(root)
    return DataOptions(verify_counts=False)


def planes(kind: int, number: int, side: int) -> npt.NDArray[np.uint8]:
    """A photo as (channel, row, column), the first pixels of which tell where it is."""
    random = np.random.default_rng(100 * kind + number)
    pixels = np.full((3, side, side), 2 * kind, np.uint8) + random.integers(0, 9, (3, side, side), dtype=np.uint8)
    pixels[:, 0, 1] = (1, 2, 3)
    return pixels


def build_binary(root: Path, name: Name) -> DataOptions:
    """Three photos of each class in each file, in turn."""
    binary = BINARIES[name]
    folder, layout = root / binary.folder, binary.layout
    folder.mkdir(parents=True)
    (folder / binary.names).write_text("\n".join(f"class {kind}" for kind in range(binary.classes)) + "\n\n")
    for part, files in enumerate((binary.train, binary.test)):
        for file in files:
            kinds = [*range(binary.classes)] * 3
            photos = [planes(kind, number, layout.side) for number, kind in enumerate(kinds)]
            stored = [photo.transpose(0, 2, 1) if layout.columns_first else photo for photo in photos]
            # Of CIFAR-100 the coarse class comes first.
            labels = [bytes([7] * layout.label_at + [kind]) if layout.label_bytes else b"" for kind in kinds]
            (folder / file).write_bytes(b"".join(map(bytes.__add__, labels, (photo.tobytes() for photo in stored))))
            if binary.labels:
                (folder / binary.labels[part]).write_bytes(bytes(kind + 1 for kind in kinds))
    return DataOptions(verify_counts=False)


BUILDERS: Mapping[str, Builder] = {
    "cifar10": lambda root, _=False: build_binary(root, "cifar10"),
    "cifar100": lambda root, _=False: build_binary(root, "cifar100"),
    "stl10": lambda root, _=False: build_binary(root, "stl10"),
    "imagenette": build_imagenette,
    "folder": build_folder,
    "csv": build_csv,
    "masks": build_masks,
    "demo": build_demo,
    "pets": build_pets,
    "voc": build_voc,
    "ade20k": build_ade20k,
    "cityscapes": build_cityscapes,
    "camvid": build_camvid,
    "imagenet": build_imagenet,
    "imagenet22k": build_imagenet22k,
    "inaturalist2021": build_inaturalist2021,
    "places205": build_places205,
    "sun397": build_sun397,
}


def root_of(name: str, path: Path) -> Path | None:
    """What is given as the folder of a data set that was built under a path."""
    return {"csv": path / "table.csv", "demo": None}.get(name, path)
