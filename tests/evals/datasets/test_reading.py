from pathlib import Path

import pytest

from capi.errors import CapiError
from capi.evals.datasets.files import check_count, class_folders, images_under, list_lines, without_excluded
from capi.evals.tasks import DataOptions


def touch(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()


def test__images_are_sorted_and_hidden_or_other_files_left_out(tmp_path: Path) -> None:
    touch(tmp_path, "b/2.JPG", "b/1.png", "a.jpeg", ".hidden/3.jpg", "b/.4.jpg", "b/notes.txt", "c/d/e.webp")
    assert images_under(tmp_path) == ["a.jpeg", "b/1.png", "b/2.JPG", "c/d/e.webp"]


def test__a_link_that_leads_back_ends(tmp_path: Path) -> None:
    touch(tmp_path, "a/1.jpg")
    (tmp_path / "a" / "up").symlink_to(tmp_path)
    assert images_under(tmp_path) == ["a/1.jpg"]


def test__a_missing_folder_says_where_to_look(tmp_path: Path) -> None:
    with pytest.raises(CapiError, match="nowhere is missing"):
        images_under(tmp_path / "nowhere")


def test__lists_lose_empty_lines_and_must_be_text(tmp_path: Path) -> None:
    (tmp_path / "list.txt").write_text("\ufeffone \n\n two\n", encoding="utf-8")
    assert list_lines(tmp_path / "list.txt") == ["one", "two"]
    (tmp_path / "list.txt").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(CapiError, match="is not a text in UTF-8"):
        list_lines(tmp_path / "list.txt")


def test__an_image_beside_class_folders_is_an_error(tmp_path: Path) -> None:
    touch(tmp_path, "cat/1.jpg", "dog/1.jpg", "stray.jpg")
    with pytest.raises(CapiError, match=r"stray\.jpg"):
        class_folders(tmp_path)


def test__counts_are_an_error_or_a_note() -> None:
    assert check_count(5, 5, "images", DataOptions()) == ()
    with pytest.raises(CapiError, match="verify_counts=false"):
        check_count(4, 5, "images", DataOptions())
    (note,) = check_count(4, 5, "images", DataOptions(verify_counts=False))
    assert "4" in note
    assert "5" in note


def test__excluded_names_are_left_out_and_noted(tmp_path: Path) -> None:
    (tmp_path / "out.txt").write_text("b.jpg\n")
    left, notes = without_excluded(["a.jpg", "b.jpg"], DataOptions(exclude=tmp_path / "out.txt"))
    assert left == {"a.jpg"}
    assert len(notes) == 1
