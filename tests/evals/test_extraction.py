import errno
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor

from capi.data.sources import EncodedImages, Files, ImageSource, image_folder
from capi.errors import CapiError
from capi.evals import extraction
from capi.evals.extraction import Extracted, extract_features
from capi.evals.feature_files import FeatureWriter, read_features
from capi.evals.features import Encoding
from capi.models.features import CapiEncoder, PixelEncoder
from capi.runtime.atomic import Output
from capi.types import Features, Statistics
from tests.data.pictures import encoded, photo

COUNT = 11
ALL_KINDS = ("patch", "mean_patch", "pooled", "register")


class InterruptionError(Exception):
    pass


class Counting:
    """An encoder without weights or fingerprint that counts what it has seen."""

    width, patch_size = 3, 4

    def __init__(self) -> None:
        self.seen = 0

    def __call__(self, images: Tensor, *, pooled: bool = True) -> Features:
        self.seen += len(images)
        means = torch.nn.functional.avg_pool2d(images, 4)
        return Features(None, torch.zeros(len(images), 0, 3), means.permute(0, 2, 3, 1))


@pytest.fixture
def source(tmp_path: Path) -> Files:
    folder = tmp_path / "images"
    (folder / "über, all").mkdir(parents=True)
    for number in range(COUNT):
        name = f"über, all/{number:02d} é.png" if number % 2 else f"{number:02d}.png"
        Image.fromarray(photo(24 + number, 40, number)).save(folder / name)
    return image_folder(folder)


def at_size(batch_size: int = 3, **settings: Any) -> Encoding:
    return Encoding(size=(16, 24), batch_size=batch_size, **settings)


def interrupting(at: int) -> Callable[[str, int, int], None]:
    def progress(what: str, done: int, total: int) -> None:
        if done >= at:
            raise InterruptionError

    return progress


def partial_of(out: Path) -> Path:
    return out.with_name(f".{out.name}.partial")


@pytest.mark.parametrize("name", ["x.safetensors", "x.parquet", "X.SAFETENSORS"])
def test__features_are_those_of_the_encoder_with_names_and_labels(
    tmp_path: Path, source: Files, model: CapiEncoder, name: str
) -> None:
    labels = ["dog, small" if number % 3 else "Größe" for number in range(COUNT)]
    out = tmp_path / "new folder" / name
    result = extract_features(
        model, source, Output(out), labels=labels, kinds=ALL_KINDS, encoding=at_size(), about={"model": "runs/a"}
    )
    shapes = {"patch": (4, 6, 32), "mean_patch": (32,), "pooled": (48,), "register": (4, 32)}
    assert result == Extracted(out, COUNT, shapes, "float32", (16, 24))
    file = read_features(out)
    assert file.names == [source.name(number) for number in range(COUNT)]
    assert file.labels == labels
    assert file.facts.root == source.root.name
    assert file.facts.about["model"] == "runs/a"
    assert (file.facts.framing.size, file.facts.framing.grid) == ((16, 24), (4, 6))
    number = file.names.index("über, all/05 é.png")
    # 7/8 of the largest rectangle of 2:3 in the middle of 29 x 40 pixels.
    box = (20 - 17.5, 14.5 - 35 / 3, 20 + 17.5, 14.5 + 35 / 3)
    picture = Image.open(source.root / file.names[number]).resize((24, 16), Image.Resampling.BICUBIC, box=box)
    shown = torch.tensor(list(picture.tobytes())).view(16, 24, 3)
    mean, std = (torch.tensor(values) for values in model.statistics)
    with torch.no_grad():
        expected = model(((shown / 255 - mean) / std).permute(2, 0, 1)[None])
    assert expected.pooled is not None
    for kind, values in {
        "patch": expected.feature_map,
        "mean_patch": expected.feature_map.mean((1, 2)),
        "pooled": expected.pooled,
        "register": expected.registers,
    }.items():
        torch.testing.assert_close(file.array(kind)[number], values[0], atol=1e-5, rtol=1e-4)
    assert not partial_of(out).exists()


def test__the_batch_size_changes_neither_order_nor_features(tmp_path: Path, source: Files, model: CapiEncoder) -> None:
    files = []
    for size in (1, 4, COUNT):
        extract_features(
            model, source, Output(tmp_path / f"{size}.safetensors"), encoding=at_size(size), kinds=["patch"]
        )
        files.append(read_features(tmp_path / f"{size}.safetensors"))
    for file in files[1:]:
        assert file.names == files[0].names
        torch.testing.assert_close(file.array("patch"), files[0].array("patch"))


@pytest.mark.parametrize("name", ["x.safetensors", "x.parquet"])
def test__an_interrupted_extraction_continues_to_the_same_bytes(
    tmp_path: Path, source: Files, model: CapiEncoder, name: str
) -> None:
    seen: list[int] = []
    model.register_forward_pre_hook(lambda _, arguments: seen.append(len(arguments[0])))
    whole, parts = tmp_path / f"whole-{name}", tmp_path / f"parts-{name}"
    settings: dict[str, Any] = {"kinds": ALL_KINDS, "labels": ["a"] * COUNT}
    extract_features(model, source, Output(whole), encoding=at_size(), **settings)
    with pytest.raises(InterruptionError):
        extract_features(model, source, Output(parts), encoding=at_size(progress=interrupting(9)), **settings)
    assert not parts.exists()
    seen.clear()
    progress: list[tuple[int, int]] = []
    again = at_size(progress=lambda _, done, total: progress.append((done, total)))
    assert extract_features(model, source, Output(parts), encoding=again, **settings).resumed_at == 6
    assert sum(seen) == COUNT - 6
    assert progress == [(6, COUNT), (9, COUNT), (COUNT, COUNT)]
    assert parts.read_bytes() == whole.read_bytes()
    assert not partial_of(parts).exists()


def test__what_was_written_after_the_last_note_is_written_again(
    tmp_path: Path, source: Files, model: CapiEncoder
) -> None:
    whole, parts = tmp_path / "whole.safetensors", tmp_path / "parts.safetensors"
    extract_features(model, source, Output(whole), encoding=at_size(), kinds=["patch"])
    with pytest.raises(InterruptionError):
        extract_features(model, source, Output(parts), encoding=at_size(progress=interrupting(9)), kinds=["patch"])
    progress = partial_of(parts) / "progress.json"
    progress.write_text(json.dumps(json.loads(progress.read_text()) | {"done": 3}))
    features = partial_of(parts) / "features.safetensors"
    content = bytearray(features.read_bytes())
    second_image = len(content) // 2
    content[second_image : second_image + 64] = b"\xff" * 64
    features.write_bytes(content)
    assert extract_features(model, source, Output(parts), encoding=at_size(), kinds=["patch"]).resumed_at == 3
    assert parts.read_bytes() == whole.read_bytes()


def test__progress_is_noted_while_the_work_continues(
    tmp_path: Path, source: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extraction, "SECONDS_BETWEEN_SAVES", 0.0)
    out = tmp_path / "x.safetensors"
    noted: list[int] = []

    def progress(what: str, done: int, total: int) -> None:
        if done > 3:
            noted.append(json.loads((partial_of(out) / "progress.json").read_text())["done"])

    extract_features(Counting(), source, Output(out), encoding=at_size(progress=progress))
    assert noted == [3, 6, 9]


def test__a_killed_process_that_had_all_images_only_has_to_finish(
    tmp_path: Path, source: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, encoder = tmp_path / "x.safetensors", Counting()

    def fail(*_: object) -> None:
        raise InterruptionError

    with monkeypatch.context() as patch:
        patch.setattr(extraction, "_finish", fail)
        with pytest.raises(InterruptionError):
            extract_features(encoder, source, Output(out), encoding=at_size())
    assert encoder.seen == COUNT
    assert extract_features(encoder, source, Output(out), encoding=at_size()).resumed_at == COUNT
    assert encoder.seen == COUNT


@dataclass
class Change:
    message: str
    settings: dict[str, Any] = field(default_factory=dict)
    encoder: object = None
    encoding: Encoding = field(default_factory=at_size)


CHANGES = [
    Change("of another encoder", encoder=PixelEncoder(2)),
    Change("of another encoder", encoder=PixelEncoder(4, Statistics((0.5,) * 3, (0.5,) * 3))),
    Change("of another encoder", encoder=Counting()),
    Change("of other images", {"labels": ["b"] * COUNT}),
    Change("its kinds is mean_patch, not patch, mean_patch", {"kinds": ("patch", "mean_patch")}),
    Change("its size is 16, 24, not 16, 16", encoding=Encoding(size=(16, 16), batch_size=3)),
    Change("its framing is middle, not whole", {"whole": True}),
    Change("its dtype is float32, not float16", {"dtype": "float16"}),
    Change("its precision is float32, not bfloat16", encoding=at_size(precision=torch.bfloat16)),
]


@pytest.mark.parametrize("change", CHANGES)
def test__what_was_started_otherwise_is_not_resumed(tmp_path: Path, source: Files, change: Change) -> None:
    out = tmp_path / "x.safetensors"
    with pytest.raises(InterruptionError):
        extract_features(
            PixelEncoder(4), source, Output(out), encoding=at_size(progress=interrupting(5)), labels=["a"] * COUNT
        )
    encoder: Any = change.encoder or PixelEncoder(4)
    settings: dict[str, Any] = {"labels": ["a"] * COUNT, "encoding": change.encoding} | change.settings
    with pytest.raises(CapiError, match=rf"{change.message}: extract with overwrite, or remove"):
        extract_features(encoder, source, Output(out), **settings)
    assert extract_features(encoder, source, Output(out, overwrite=True), **settings).resumed_at == 0
    assert len(read_features(out)) == COUNT


def test__other_images_are_not_taken_for_those_it_was_started_with(tmp_path: Path, source: Files) -> None:
    out = tmp_path / "x.safetensors"
    elsewhere = Files(Path(shutil.copytree(source.root, tmp_path / "copy")), [source.name(i) for i in range(COUNT)])
    fewer = Files(source.root, [source.name(i) for i in range(COUNT - 1)])
    with pytest.raises(InterruptionError):
        extract_features(PixelEncoder(4), source, Output(out), encoding=at_size(progress=interrupting(5)))
    for other in (elsewhere, fewer):
        with pytest.raises(CapiError, match="of other images"):
            extract_features(PixelEncoder(4), other, Output(out), encoding=at_size())


def test__encoders_without_fingerprint_are_distinguished_by_what_is_said_of_them(tmp_path: Path, source: Files) -> None:
    out = tmp_path / "x.safetensors"
    about_one = {"model": Path("one"), "layers": (1, 2)}
    with pytest.raises(InterruptionError):
        extract_features(Counting(), source, Output(out), encoding=at_size(progress=interrupting(5)), about=about_one)
    with pytest.raises(CapiError, match="of another encoder"):
        extract_features(Counting(), source, Output(out), encoding=at_size(), about=about_one | {"model": "two"})
    assert extract_features(Counting(), source, Output(out), encoding=at_size(), about=about_one).resumed_at == 3
    assert read_features(out).facts.about["model"] == "one"


@pytest.mark.parametrize("damaged", ["progress.json", "features.safetensors"])
def test__a_damaged_beginning_is_an_error_until_it_is_overwritten(tmp_path: Path, source: Files, damaged: str) -> None:
    out = tmp_path / "x.safetensors"
    with pytest.raises(InterruptionError):
        extract_features(Counting(), source, Output(out), encoding=at_size(progress=interrupting(5)))
    content = (partial_of(out) / damaged).read_bytes()
    (partial_of(out) / damaged).write_bytes(content[: len(content) // 2])
    with pytest.raises(CapiError, match="it is damaged"):
        extract_features(Counting(), source, Output(out), encoding=at_size())
    assert extract_features(Counting(), source, Output(out, overwrite=True), encoding=at_size()).resumed_at == 0


def test__a_file_that_is_there_stays_until_the_new_one_is_complete(tmp_path: Path, source: Files) -> None:
    out = tmp_path / "x.safetensors"
    out.write_text("dear to someone")
    with pytest.raises(CapiError, match="there already"):
        extract_features(Counting(), source, Output(out), encoding=at_size())
    with pytest.raises(InterruptionError):
        extract_features(Counting(), source, Output(out, overwrite=True), encoding=at_size(progress=interrupting(5)))
    assert out.read_text() == "dear to someone"
    assert extract_features(Counting(), source, Output(out, overwrite=True), encoding=at_size()).resumed_at == 3
    assert len(read_features(out)) == COUNT


def test__a_full_disk_is_reported_and_what_was_done_is_kept(
    tmp_path: Path, source: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, write = tmp_path / "x.safetensors", FeatureWriter.write

    def full(self: FeatureWriter, first: int, features: dict[str, Tensor]) -> None:
        if first >= 6:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(self, first, features)

    with monkeypatch.context() as patch:
        patch.setattr(FeatureWriter, "write", full)
        with pytest.raises(CapiError, match=r"No space left.*make room"):
            extract_features(Counting(), source, Output(out), encoding=at_size())
    assert extract_features(Counting(), source, Output(out), encoding=at_size()).resumed_at == 6


def test__too_little_room_is_reported_at_once(tmp_path: Path, source: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    needed = COUNT * 3 * 4
    for free, name, fits in (
        (needed, "a.safetensors", True),
        (needed - 1, "b.safetensors", False),
        (2 * needed, "c.parquet", True),
        (2 * needed - 1, "d.parquet", False),
    ):
        usage = (10**9, 10**9 - free, free)
        monkeypatch.setattr(shutil, "disk_usage", lambda _, usage=usage: shutil._ntuple_diskusage(*usage))
        if fits:
            extract_features(Counting(), source, Output(tmp_path / name), encoding=at_size())
        else:
            with pytest.raises(CapiError, match="make room"):
                extract_features(Counting(), source, Output(tmp_path / name), encoding=at_size())
            assert not partial_of(tmp_path / name).exists()


def test__a_place_that_cannot_be_written_is_an_error(tmp_path: Path, source: Files) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CapiError, match=r"cannot be written .*choose another place"):
        extract_features(Counting(), source, Output(tmp_path / "file" / "x.safetensors"), encoding=at_size())


def test__a_second_process_waits_for_its_turn(tmp_path: Path, source: Files) -> None:
    out = tmp_path / "x.safetensors"
    partial_of(out).mkdir()
    hold = (
        "import fcntl, sys; file = open(sys.argv[1], 'a'); fcntl.flock(file, fcntl.LOCK_EX); print(flush=True); "
        "sys.stdin.read()"
    )
    command = [sys.executable, "-S", "-c", hold, str(partial_of(out) / ".lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        with pytest.raises(CapiError, match="another process"):
            extract_features(Counting(), source, Output(out), encoding=at_size())
        assert partial_of(out).exists()
        other.communicate()
    assert extract_features(Counting(), source, Output(out), encoding=at_size()).images == COUNT


def test__images_in_memory_have_no_root(tmp_path: Path) -> None:
    source: ImageSource = EncodedImages(["a/0", "a/1"], [encoded(photo(20, 30, seed), "PNG") for seed in range(2)])
    extract_features(Counting(), source, Output(tmp_path / "x.safetensors"), encoding=at_size())
    file = read_features(tmp_path / "x.safetensors")
    assert file.names == ["a/0", "a/1"]
    assert file.facts.root is None


def test__a_size_that_patches_do_not_fill_becomes_the_nearest_one_and_is_reported(
    tmp_path: Path, source: Files, caplog: pytest.LogCaptureFixture
) -> None:
    result = extract_features(Counting(), source, Output(tmp_path / "x.safetensors"), encoding=Encoding(size=(17, 23)))
    assert result.size == (16, 24)
    assert "images of 16 x 24 pixels: the nearest to 17 x 23" in caplog.text


def test__a_broken_image_is_named_and_leaves_nothing_behind(tmp_path: Path, source: Files) -> None:
    (source.root / source.name(0)).write_text("no image")
    with pytest.raises(CapiError, match=r"00.png cannot be read"):
        extract_features(Counting(), source, Output(tmp_path / "x.safetensors"), encoding=at_size())
    assert not partial_of(tmp_path / "x.safetensors").exists()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"labels": ["a"]}, "1 labels do not fit 11 images"),
        ({"kinds": ["patches"]}, 'no "patches" features.*did you mean "patch"'),
        ({"kinds": []}, "at least one"),
        ({"kinds": ["patch", "patch"]}, "once"),
        ({"kinds": ["pooled"]}, "no pooled vector"),
        ({"kinds": ["register"]}, "no registers"),
        ({"dtype": "float61"}, 'did you mean "float16"'),
        ({"out": "x.npz"}, "neither .safetensors nor .parquet"),
        ({"out": "images.safetensors"}, "is a folder"),
        ({"source": EncodedImages([], [])}, "no images"),
    ],
)
def test__requests_that_make_no_sense_are_errors(
    tmp_path: Path, source: Files, settings: dict[str, Any], message: str
) -> None:
    (tmp_path / "images.safetensors").mkdir()
    given: dict[str, Any] = {"source": source, "out": "x.safetensors", "encoding": at_size()} | settings
    out = tmp_path / given.pop("out")
    with pytest.raises(CapiError, match=message):
        extract_features(Counting(), given.pop("source"), Output(out), **given)
    assert not partial_of(out).exists()


def test__names_that_parquet_cannot_hold_are_reported_before_the_work(tmp_path: Path, source: Files) -> None:
    name = b"caf\xe9.png".decode("utf-8", "surrogateescape")
    strange = EncodedImages([name], [encoded(photo(20, 30), "PNG")])
    encoder = Counting()
    with pytest.raises(CapiError, match="use safetensors"):
        extract_features(encoder, strange, Output(tmp_path / "x.parquet"), encoding=at_size())
    assert encoder.seen == 0
    extract_features(encoder, strange, Output(tmp_path / "x.safetensors"), encoding=at_size())
    assert read_features(tmp_path / "x.safetensors").names == [name]


def test__without_pyarrow_the_error_says_what_to_install(
    tmp_path: Path, source: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(CapiError, match=r"pip install 'capi\[parquet\]'"):
        extract_features(Counting(), source, Output(tmp_path / "x.parquet"), encoding=at_size())
