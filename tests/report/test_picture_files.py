import base64
import io
import json
from pathlib import Path

from PIL import Image

from capi.report.picture_files import (
    IMAGES_SHOWN,
    PROTOTYPES_SHOWN,
    STEPS_SHOWN,
    read_emergence,
    read_neighbors,
    read_picture,
    read_pixel_scores,
    read_prototypes,
)
from tests.report.run_folders import add_pictures


def test__a_picture_is_carried_whole(tmp_path: Path) -> None:
    Image.new("RGB", (3, 2), "red").save(tmp_path / "a.png")
    picture = read_picture(tmp_path / "a.png")
    assert picture is not None
    kind, _, content = picture.address.partition(",")
    assert kind == "data:image/png;base64"
    with Image.open(io.BytesIO(base64.b64decode(content))) as image:
        assert image.size == (3, 2) == (picture.width, picture.height)


def test__what_is_no_whole_picture_is_none(tmp_path: Path) -> None:
    Image.new("RGB", (64, 64), "red").save(tmp_path / "a.jpg")
    (tmp_path / "half.jpg").write_bytes((tmp_path / "a.jpg").read_bytes()[:400])
    (tmp_path / "text.png").write_text("<script>")
    Image.new("RGB", (9000, 1)).save(tmp_path / "long.png")
    for name in ("half.jpg", "text.png", "long.png", "missing.png", "."):
        assert read_picture(tmp_path / name) is None


def test__fixed_images_come_with_their_steps_in_order(tmp_path: Path) -> None:
    add_pictures(tmp_path, images=2, steps=(100, 0, 20))
    snapshots, note = read_emergence(tmp_path / "pictures" / "snapshots")
    assert [place.number for place in snapshots] == [0, 1]
    assert [step for step, _ in snapshots[0].pictures] == [0, 20, 100]
    assert all(place.photo for place in snapshots)
    assert note == ""


def test__many_steps_are_spread_evenly_with_both_ends(tmp_path: Path) -> None:
    add_pictures(tmp_path, images=1, steps=range(0, 1000, 10))
    (snapshots,), note = read_emergence(tmp_path / "pictures" / "snapshots")
    steps = [step for step, _ in snapshots.pictures]
    assert len(steps) == STEPS_SHOWN
    assert (steps[0], steps[-1]) == (0, 990)
    assert f"{STEPS_SHOWN} of 100 steps" in note


def test__many_images_are_cut_and_said(tmp_path: Path) -> None:
    add_pictures(tmp_path, images=IMAGES_SHOWN + 2, steps=(0,))
    snapshots, note = read_emergence(tmp_path / "pictures" / "snapshots")
    assert len(snapshots) == IMAGES_SHOWN
    assert f"{IMAGES_SHOWN} of {IMAGES_SHOWN + 2} images" in note


def test__missing_pictures_are_said_with_what_to_do(tmp_path: Path) -> None:
    assert read_emergence(tmp_path)[0] == []
    assert "capi visualize" in read_emergence(tmp_path)[1]
    assert read_prototypes(tmp_path)[0] == []
    assert "capi explore" in read_prototypes(tmp_path)[1]


def test__broken_snapshots_leave_the_others(tmp_path: Path) -> None:
    add_pictures(tmp_path, images=1, steps=(0, 10))
    folder = tmp_path / "pictures" / "snapshots"
    (folder / "step_00000000_0.png").write_text("broken")
    (snapshots,), _ = read_emergence(folder)
    assert [step for step, _ in snapshots.pictures] == [10]
    (folder / "step_00000010_0.png").write_text("broken")
    assert read_emergence(folder)[0] == []
    assert "can be read" in read_emergence(folder)[1]


def test__strips_come_with_number_and_share(tmp_path: Path) -> None:
    add_pictures(tmp_path, prototypes=3)
    strips, note = read_prototypes(tmp_path / "pictures" / "prototypes")
    assert [strip.number for strip in strips] == [0, 7, 14]
    assert strips[1].share == 0.05
    assert note == "Patches of <b>675</b> images."


def test__an_index_cannot_point_out_of_its_folder(tmp_path: Path) -> None:
    Image.new("RGB", (3, 2)).save(tmp_path / "secret.png")
    folder = tmp_path / "prototypes"
    folder.mkdir()
    listed = [{"number": 1, "share": 0.1, "file": name} for name in ("../secret.png", str(tmp_path / "secret.png"))]
    (folder / "index.json").write_text(json.dumps({"prototypes": [*listed, {"number": "x"}, 5]}))
    strips, note = read_prototypes(folder)
    assert strips == []
    assert "3 pictures could not be read" in note


def test__many_prototypes_are_cut_and_said(tmp_path: Path) -> None:
    add_pictures(tmp_path, images=1, steps=(0,), prototypes=PROTOTYPES_SHOWN + 4)
    strips, note = read_prototypes(tmp_path / "pictures" / "prototypes")
    assert len(strips) == PROTOTYPES_SHOWN
    assert f"{PROTOTYPES_SHOWN} of {PROTOTYPES_SHOWN + 4}" in note


def test__a_broken_index_counts_as_none(tmp_path: Path) -> None:
    for content in ("{", "[]", '{"prototypes": 3}'):
        (tmp_path / "index.json").write_text(content)
        assert read_prototypes(tmp_path)[0] == []


def test__neighbors_and_pixels_of_a_strange_run_are_left_out(tmp_path: Path) -> None:
    Image.new("RGB", (8, 8), "red").save(tmp_path / "a.jpg")
    good = [{"file": "a.jpg", "cosine": None}, {"file": "a.jpg", "cosine": 0.5}]
    for rows, expected in (
        ([good], 1),
        ([[{"file": "../a.jpg"}], [{"file": 3}], [{}], "x", [], good], 1),
        ({"a": 1}, 0),
        ([[{"file": "gone.jpg", "cosine": 0.1}]], 0),
    ):
        (tmp_path / "index.json").write_text(json.dumps(rows))
        assert len(read_neighbors(tmp_path)) == expected
    for scores, valid in (({"demo/knn": 0.3, "a": 7.0, "b": "x"}, {"demo/knn": 0.3}), ([1], {})):
        (tmp_path / "pixels.json").write_text(json.dumps(scores))
        assert read_pixel_scores(tmp_path) == valid
