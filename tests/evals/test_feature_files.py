import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from capi.errors import CapiError
from capi.evals import feature_files
from capi.evals.feature_files import (
    FeatureFacts,
    FeatureFile,
    Framing,
    begin_features,
    filling,
    read_features,
    write_parquet,
)

NAMES = ["a b.jpg", "dir/ü,ß 中.png", "", 'quote"\\.jpg', "line\nbreak.jpg", "z.jpg"]
LABELS = ["dog", "cat", "dog", "", "Katze, groß", "cat"]


def facts(**changes: Any) -> FeatureFacts:
    values: dict[str, Any] = {
        "images": 6,
        "shapes": {"patch": (2, 3, 5), "mean_patch": (5,)},
        "dtype": "float32",
        "framing": Framing((8, 12), (2, 3)),
        "encoder": {"width": 5},
        "root": "data/ünder",
        "classes": sorted(set(LABELS)),
        "about": {"model": "runs/one"},
    }
    return FeatureFacts(**(values | changes))


def features(of: FeatureFacts) -> dict[str, Tensor]:
    return {kind: torch.randn(of.images, *shape) for kind, shape in of.shapes.items()}


def written(path: Path, of: FeatureFacts, values: dict[str, Tensor], labels: list[str] | None = LABELS) -> FeatureFile:
    begin_features(path, of, NAMES[: of.images], labels)
    with filling(path) as writer:
        writer.write(4, {kind: rows[4:] for kind, rows in values.items()})
        writer.write(0, {kind: rows[:4] for kind, rows in values.items()})
        writer.flush()
    if path.suffix == ".parquet":
        complete = path.rename(path.with_name("complete.safetensors"))
        write_parquet(read_features(complete), path)
    return read_features(path)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("name", ["x.safetensors", "x.parquet"])
def test__what_is_written_is_read(tmp_path: Path, name: str, dtype: str) -> None:
    expected = facts(dtype=dtype)
    values = features(expected)
    file = written(tmp_path / name, expected, values)
    assert len(file) == 6
    assert file.names == NAMES
    assert file.labels == LABELS
    assert file.facts == expected
    for kind, rows in values.items():
        assert torch.equal(file.array(kind), rows.to(getattr(torch, dtype)))


@pytest.mark.parametrize("name", ["x.safetensors", "x.parquet"])
def test__without_labels_there_are_none(tmp_path: Path, name: str) -> None:
    of = facts(classes=None, root=None)
    file = written(tmp_path / name, of, features(of), None)
    assert file.labels is None
    assert file.facts.root is None


def test__safetensors_alone_reads_the_features(tmp_path: Path) -> None:
    values = features(facts())
    written(tmp_path / "x.safetensors", facts(), values)
    arrays = load_file(tmp_path / "x.safetensors")
    for kind, rows in values.items():
        assert torch.equal(arrays[kind], rows)
    assert arrays["names"].numpy().tobytes().decode() == "".join(NAMES)
    assert arrays["labels"].tolist() == [sorted(set(LABELS)).index(label) for label in LABELS]


def test__tensors_begin_at_multiples_of_their_items(tmp_path: Path) -> None:
    for length in range(8):
        path = tmp_path / f"{length}.safetensors"
        of = facts(about={"model": "m" * length}, dtype="float16")
        written(path, of, features(of))
        content = path.read_bytes()
        header_length = int.from_bytes(content[:8], "little")
        entries = json.loads(content[8 : 8 + header_length])
        sizes = {"I64": 8, "F16": 2, "U8": 1}
        del entries["__metadata__"]
        assert all(
            (8 + header_length + entry["data_offsets"][0]) % sizes[entry["dtype"]] == 0 for entry in entries.values()
        )


def test__pyarrow_alone_reads_a_row_for_each_image(tmp_path: Path) -> None:
    values = features(facts())
    written(tmp_path / "x.parquet", facts(), values)
    rows = pyarrow.parquet.read_table(tmp_path / "x.parquet").to_pylist()
    assert [row["name"] for row in rows] == NAMES
    assert [row["label"] for row in rows] == LABELS
    np.testing.assert_array_equal([row["patch"] for row in rows], values["patch"].flatten(1).numpy())


@pytest.mark.parametrize("name", ["x.safetensors", "x.parquet"])
def test__parts_are_small_and_together_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(feature_files, "_PART_BYTES", 4 * facts().image_bytes + 1)
    file = written(tmp_path / name, facts(), features(facts()))
    parts = list(file.parts("patch"))
    assert [len(part) for part in parts] == [4, 2]
    assert torch.equal(torch.cat(parts), file.array("patch"))
    if name.endswith("parquet"):
        assert pyarrow.parquet.ParquetFile(tmp_path / name).num_row_groups == 2


def test__names_that_are_no_valid_text_survive(tmp_path: Path) -> None:
    name = b"caf\xe9.jpg".decode("utf-8", "surrogateescape")
    of = facts(images=1, classes=None, root="of/" + name)
    begin_features(tmp_path / "x.safetensors", of, [name], None)
    file = read_features(tmp_path / "x.safetensors")
    assert file.names == [name]
    assert file.facts.root == "of/" + name


@pytest.mark.parametrize("name", ["x.safetensors", "x.parquet"])
def test__a_kind_that_is_not_there_is_an_error_that_names_those_that_are(tmp_path: Path, name: str) -> None:
    file = written(tmp_path / name, facts(), features(facts()))
    for call in (lambda: file.array("pooled"), lambda: list(file.parts("pooled"))):
        with pytest.raises(CapiError, match='no "pooled" features, but patch, mean_patch'):
            call()


def test__files_of_another_kind_are_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no features")
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "cut").write_bytes(b"PAR1 and then nothing")
    save_file({"x": torch.zeros(1)}, tmp_path / "weights", metadata={"capi": "1"})
    pyarrow.parquet.write_table(pyarrow.table({"name": ["a"]}), tmp_path / "table")
    for name in ("text", "empty", "cut", "weights", "table"):
        with pytest.raises(CapiError, match="is no file of features"):
            read_features(tmp_path / name)
    with pytest.raises(CapiError, match="is a folder: write its features to a file with `capi extract` first"):
        read_features(tmp_path)
    with pytest.raises(CapiError, match=r"there is no file .*absent: give one that `capi extract` wrote"):
        read_features(tmp_path / "absent")


@pytest.mark.parametrize("name", ["x.safetensors", "x.parquet"])
def test__a_file_that_was_cut_short_is_refused(tmp_path: Path, name: str) -> None:
    written(tmp_path / name, facts(), features(facts()))
    content = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(content[:-1])
    with pytest.raises(CapiError, match="is no file of features"):
        read_features(tmp_path / name)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": 2}, "newer capi"),
        ({"images": 7}, "does not hold what its description says"),
        ({"shapes": {"patch": [2, 3, 6]}}, "does not hold what its description says"),
        ({"dtype": "float8"}, "damaged"),
        ({"framing": {"size": 3}}, "damaged"),
        ({"unheard": 1}, "damaged"),
    ],
)
def test__a_description_that_does_not_fit_is_an_error(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    written(tmp_path / "x.safetensors", facts(), features(facts()))
    tensors = load_file(tmp_path / "x.safetensors")
    description = json.dumps(json.loads(facts().to_text()) | changes)
    save_file(tensors, tmp_path / "y.safetensors", metadata={"capi_features": description})
    with pytest.raises(CapiError, match=message):
        read_features(tmp_path / "y.safetensors")


def test__features_that_float16_cannot_hold_are_an_error(tmp_path: Path) -> None:
    of = facts(dtype="float16", shapes={"mean_patch": (5,)})
    with pytest.raises(CapiError, match="too large for float16"):
        written(tmp_path / "x.safetensors", of, {"mean_patch": torch.full((6, 5), 1e5)})


def test__features_of_another_shape_are_an_error(tmp_path: Path) -> None:
    of = facts(shapes={"mean_patch": (5,)})
    with pytest.raises(CapiError, match=r"shape \(4,\) after some of shape \(5,\)"):
        written(tmp_path / "x.safetensors", of, {"mean_patch": torch.zeros(6, 4)})


def test__too_many_classes_for_a_header_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feature_files, "_LONGEST_HEADER", 500)
    with pytest.raises(CapiError, match="without labels"):
        begin_features(tmp_path / "x.safetensors", facts(), NAMES, LABELS)


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("image_size", [(40, 90), (70, 30), (16, 24)])
def test__the_middle_of_a_patch_lies_in_that_patch(image_size: tuple[int, int], whole: bool) -> None:
    framing = Framing((16, 24), (4, 6), whole)
    for row in range(4):
        for column in range(6):
            left, top, right, bottom = framing.patch_box(image_size, row, column)
            assert framing.patch_at(image_size, (left + right) / 2, (top + bottom) / 2) == (row, column)


def test__patches_of_the_middle_tile_what_was_kept() -> None:
    # Of 80 x 160 pixels, 7/8 of the largest square is a square of 70, whose quarter is 17.5.
    framing = Framing((16, 16), (4, 4))
    assert framing.patch_box((80, 160), 0, 0) == (45, 5, 62.5, 22.5)
    assert framing.patch_box((80, 160), 3, 1) == (62.5, 57.5, 80, 75)
    assert Framing((16, 16), (4, 4), whole=True).patch_box((80, 160), 3, 1) == (40, 60, 80, 80)


def test__a_point_that_the_encoder_did_not_see_is_an_error() -> None:
    framing = Framing((16, 16), (4, 4))
    assert framing.patch_at((80, 160), 45.0, 5.0) == (0, 0)
    assert framing.patch_at((80, 160), 114.9, 74.9) == (3, 3)
    for x, y in ((44.0, 40.0), (115.0, 40.0), (80.0, 4.0), (80.0, 75.0)):
        with pytest.raises(CapiError, match=r"x from 45 to 115, y from 5 to 75.*whole images"):
            framing.patch_at((80, 160), x, y)
    with pytest.raises(CapiError, match=r"choose one in there$"):
        Framing((16, 16), (4, 4), whole=True).patch_at((80, 160), 160.0, 0.0)
