"""Image files: of known formats, regular, and below the folder of the list that names them."""

import os
from pathlib import Path

import pytest
from PIL import Image, UnidentifiedImageError

from capi.data.locations import list_images, open_images
from capi.data.sources import csv_images, image_folder
from capi.errors import CapiError
from capi.runtime.image_files import open_image, read_image


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of two images with a list, and an image outside of it."""
    (tmp_path / "own" / "sub").mkdir(parents=True)
    for name in ("own/a.png", "own/sub/b.png", "outside.png"):
        Image.new("RGB", (4, 4)).save(tmp_path / name)
    return tmp_path / "own"


def _listed(folder: Path, *names: str) -> Path:
    (folder / "list.csv").write_text("file\n" + "\n".join(names) + "\n")
    return folder / "list.csv"


def test__formats_that_are_not_of_photographs_are_not_even_tried(tmp_path: Path) -> None:
    Image.new("RGB", (4, 4)).save(tmp_path / "a.png", "ICO")
    with pytest.raises(UnidentifiedImageError):
        open_image(tmp_path / "a.png")


def test__pipes_and_devices_are_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.png")
    for path in (tmp_path / "pipe.png", Path("/dev/zero")):
        with pytest.raises(OSError, match="pipe or device"):
            read_image(path)


def test__a_walk_takes_regular_files_and_links_to_them(folder: Path) -> None:
    os.mkfifo(folder / "pipe.png")
    (folder / "zero.png").symlink_to("/dev/zero")
    (folder / "link.png").symlink_to("a.png")
    (folder / "lost.png").symlink_to("nowhere")
    source = image_folder(folder)
    # A link that leads nowhere is reported as a broken image, not left out in silence.
    assert [source.name(number) for number in range(len(source))] == ["a.png", "link.png", "lost.png", "sub/b.png"]


@pytest.mark.parametrize(
    "name", ["/etc/hostname", "../outside.png", "sub/../../outside.png", "link.png", "linked/x.png"]
)
def test__a_list_that_leads_out_of_its_folder_is_refused(folder: Path, name: str) -> None:
    (folder / "link.png").symlink_to("../outside.png")
    (folder / "linked").symlink_to("..")
    path = _listed(folder, "a.png", name)
    for read in (csv_images, lambda data: list_images(str(data)), open_images):
        with pytest.raises(CapiError, match=r"does not lie below .*FILE.csv\?images=FOLDER"):
            read(path)


def test__links_and_dots_that_stay_inside_are_read(folder: Path) -> None:
    (folder / "link.png").symlink_to("sub/b.png")
    assert len(csv_images(_listed(folder, "a.png", "link.png", "sub/../a.png", "missing.png"))) == 4


def test__whoever_calls_says_where_the_images_of_a_list_lie(folder: Path) -> None:
    path = _listed(folder, str(folder.parent / "outside.png"), "own/a.png")
    named = f"{path}?images={folder.parent}"
    for source in (open_images(named), csv_images(named), list_images(named).images):
        read = {source.read(number) for number in range(len(source))}
        assert read == {folder.parent / "outside.png", folder / "a.png"}
    with pytest.raises(CapiError, match="does not lie below"):
        open_images(f"{path}?images={folder}")
