"""What is shared names neither the host nor the user nor an absolute path of the machine that made it."""

import json
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from PIL import Image

from capi.api import race
from capi.evals.feature_files import read_features, write_parquet
from capi.evals.fitted_probes import load_probe, save_probe
from capi.report.watch import WatchServer
from tests.api.studies import QUICK, SMALL, labeled_photos
from tests.cli.conftest import RunHere
from tests.cli.tiny_runs import TREE
from tests.evals.datasets.layouts import build_folder
from tests.photos import noise_photos

# With spaces, at which a search for paths must not end.
USER, HOST, PROJECT, DISK = "ann secretuser", "secrethost", "one secretproject", "two secretdisk"
SECRETS = ("secretuser", "secrethost", "secretproject", "secretdisk")


class Places:
    """A home with a project in it, and a disk with data; only last parts of paths may be seen by others."""

    def __init__(self, root: Path) -> None:
        self.home = root / USER
        self.project, self.disk = self.home / PROJECT, root / DISK
        self.run, self.shared, self.photos = self.project / "run", self.project / "shared", self.disk / "photos"
        self.classes, self.config = self.disk / "classes", self.project / "tiny.yaml"


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Places:
    places_here = Places(tmp_path)
    places_here.project.mkdir(parents=True)
    monkeypatch.setenv("HOME", str(places_here.home))
    for name in ("USER", "LOGNAME", "USERNAME"):
        monkeypatch.setenv(name, USER)
    monkeypatch.setenv("HOSTNAME", HOST)
    monkeypatch.setattr(platform, "node", lambda: HOST)
    monkeypatch.setattr(socket, "gethostname", lambda: HOST)
    return places_here


@pytest.fixture
def run(run_here: RunHere, places: Places) -> Path:
    """A run that every place of it gets by its absolute path: data, weights to start from, evaluations."""
    noise_photos(places.photos)
    build_folder(places.classes)
    # Results warn of an image that is in both splits.
    shutil.copy(places.classes / "train" / "ant" / "3.png", places.classes / "val" / "bee" / "copy.png")
    benchmark = {"benchmark": "folder/knn", "every_steps": 1, "options": {"data": str(places.classes), "image_size": 8}}
    places.config.write_text(yaml.safe_dump(TREE | {"evaluations": [benchmark]}))
    words = ["pretrain", places.config, "--data", places.photos, "--device", "cpu"]
    assert run_here(*words, "--out", places.project / "first").code == 0
    ran = run_here(*words, "--out", places.run, f"init.encoder={places.project / 'first'}")
    assert ran.code == 0, ran.stderr
    return places.run


def pieces(path: Path) -> Iterator[bytes]:
    """All that a file says: its bytes, the members of an archive, and what a picture notes about itself."""
    yield path.name.encode()
    yield path.read_bytes()
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            for name in archive.namelist():
                yield name.encode()
                yield archive.read(name)
    if path.suffix in {".png", ".jpg"}:
        with Image.open(path) as image:
            image.load()
            yield repr(image.info).encode()


def assert_nameless(root: Path, *files: Path) -> None:
    secrets = [word.encode() for word in (*SECRETS, str(root))]
    assert files
    for path in files:
        for piece in pieces(path):
            for secret in secrets:
                place = piece.find(secret)
                assert place < 0, (path.name, secret, piece[max(place - 80, 0) : place + 80])


def all_files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def test__reports_exports_cards_and_pages_name_no_place(
    run_here: RunHere, run: Path, places: Places, tmp_path: Path
) -> None:
    shared = places.shared
    commands: list[list[object]] = [
        ["report", run, "--out", shared / "report.html", "--device", "cpu"],
        ["export", run, "--out", shared / "encoder.safetensors"],
        ["export", run, "--format", "released", "--out", shared / "encoder.pth"],
        ["export", run, "--format", "transformers", "--out", shared / "transformers"],
        ["push", run, "ann/model", "--dry-run", "--licence", "mit", "--out", shared / "hub"],
        ["extract", run, places.photos, "--image-size", 32, "--out", shared / "features.safetensors"],
        ["extract", run, places.photos, "--image-size", 32, "--out", shared / "features.parquet"],
    ]
    shared.mkdir()
    for command in commands:
        ran = run_here(*command)
        assert ran.code == 0, (command, ran.stderr)
    assert_nameless(tmp_path, *all_files(shared))
    report = (shared / "report.html").read_text()
    # What tells people where it comes from is still there.
    assert "6 images of photos" in report
    assert "--data photos" in report
    assert "data: classes" in report


def test__data_of_a_csv_and_options_with_spaces_name_no_place(
    run_here: RunHere, run: Path, places: Places, tmp_path: Path
) -> None:
    table, out = places.project / "table.csv", places.project / "of csv"
    table.write_text("file\n" + "".join(f"{number}.png\n" for number in range(6)))
    evaluations = f'evaluations=[{{benchmark: folder/knn, options: {{data: "{places.classes}", image_size: 8}}}}]'
    words = ["pretrain", places.config, "--data", f"{table}?images={places.photos}", "--device", "cpu", "--out", out]
    evaluated, hub = places.shared / "evaluated", places.shared / "hub"
    commands: list[list[object]] = [
        [*words, evaluations],
        ["report", out, "--out", places.shared / "report.html", "--device", "cpu"],
        ["evaluate", out, "folder/knn", f"data={places.classes}", "image_size=8", "--out", evaluated],
        ["push", out, "ann/model", "--dry-run", "--licence", "mit", "--results", evaluated, "--out", hub],
    ]
    places.shared.mkdir()
    for command in commands:
        ran = run_here(*command)
        assert ran.code == 0, (command, ran.stderr)
    assert_nameless(tmp_path, *all_files(places.shared))
    assert "6 images of table.csv?images=photos" in (places.shared / "report.html").read_text()
    assert "files called table.csv?images=photos" in (hub / "README.md").read_text()
    assert "for example val/bee/copy.png and train/ant/3.png" in (evaluated / "results.md").read_text()


def test__results_predictions_comparisons_and_pictures_name_no_place(
    run_here: RunHere, run: Path, places: Places, tmp_path: Path
) -> None:
    shared = places.shared
    shutil.copytree(places.photos, places.disk / "broken")
    (places.disk / "broken" / "empty.png").touch()
    (places.disk / "broken" / "gone.png").symlink_to(places.disk / "nothing.png")
    benchmark = ["folder/knn", f"data={places.classes}", "image_size=8"]
    probe = shared / "evaluated" / "probe.safetensors"
    other = ["--on", benchmark[0], *benchmark[1:], "--out", shared / "compared"]
    commands: list[list[object]] = [
        ["evaluate", run, *benchmark, "--out", shared / "evaluated"],
        ["predict", run, probe, places.disk / "broken", "--out", shared / "labels"],
        ["compare", run, places.project / "first", f"untrained:{run}", places.disk / "missing", *other],
        ["visualize", run, places.disk / "broken", "--size", 32, "--out", shared / "pictures"],
    ]
    for command in commands:
        ran = run_here(*command)
        # A model of a comparison that is missing is reported with exit code 1.
        assert ran.code == (command[0] == "compare"), (command, ran.stderr)
    assert_nameless(tmp_path, *all_files(shared))
    assert "untrained:run" in (shared / "compared" / "comparison.md").read_text()


def test__comments_and_errors_name_no_place(run_here: RunHere, run: Path, places: Places, tmp_path: Path) -> None:
    shared = places.shared
    shared.mkdir()
    config, page = run / "config.yaml", shared / "report.html"
    text = config.read_text()
    for odd in (
        "/srv/ann secretuser, (old): secretproject/photos",
        "/srv/o' secretuser's \"secretproject/photos",
        "D:\\ann secretuser\\secretproject\\photos",
    ):
        config.write_text(f"# images: {odd}\n{text}")
        assert run_here("report", run, "--out", page, "--device", "cpu").code == 0
        assert_nameless(tmp_path, page)
        # Keys that no config has are reported in an error.
        config.write_text(text + json.dumps(f"unknown of {odd}\n{odd}") + ": 1\n")
        assert run_here("report", run, "--out", page, "--device", "cpu").code == 0
        assert "The config cannot be read" in page.read_text()
        assert_nameless(tmp_path, page)
        config.write_text(f"{text}\n{odd}: [\n")
        assert run_here("report", run, "--out", page, "--device", "cpu").code == 0
        assert "not valid YAML" in page.read_text()
        assert_nameless(tmp_path, page)


@pytest.mark.parametrize("folder", ["of\nsecretuser", "o' secretuser", "a\\secretuser", 'of: secretuser, "x"'])
def test__folders_with_odd_names_are_not_shared(run_here: RunHere, places: Places, tmp_path: Path, folder: str) -> None:
    places.photos, places.classes = (places.disk / folder / name for name in ("photos", "classes"))
    noise_photos(places.photos)
    build_folder(places.classes)
    benchmark = {"benchmark": "folder/knn", "every_steps": 1, "options": {"data": str(places.classes), "image_size": 8}}
    places.config.write_text(yaml.safe_dump(TREE | {"evaluations": [benchmark]}))
    # An override is YAML, in which such a name needs quotes.
    data = f"data={json.dumps(str(places.classes))}"
    shared, words = places.shared, ["--data", places.photos, "--device", "cpu", "run.report=false"]
    commands: list[list[object]] = [
        ["pretrain", places.config, *words, "--out", places.run],
        ["report", places.run, "--out", shared / "report.html", "--device", "cpu"],
        ["export", places.run, "--out", shared / "encoder.safetensors"],
        ["evaluate", places.run, "folder/knn", data, "image_size=8", "--out", shared / "evaluated"],
        ["visualize", places.run, places.photos, "--size", 32, "--out", shared / "pictures"],
        ["push", places.run, "ann/model", "--dry-run", "--licence", "mit", "--out", shared / "hub"],
    ]
    shared.mkdir()
    for command in commands:
        ran = run_here(*command)
        assert ran.code == 0, (command, ran.stderr)
    assert_nameless(tmp_path, *all_files(shared))
    assert "6 images of photos" in (shared / "report.html").read_text()


def test__free_text_in_a_command_names_no_place(run_here: RunHere, run: Path, places: Places, tmp_path: Path) -> None:
    record, page = json.loads((run / "run.json").read_text()), places.project / "page.html"
    secrets = ["of /srv/ann secretuser/x", "-o/srv/ann secretuser/x", "D:\\ann secretuser\\x", "/a\nsecretuser/x"]
    record["starts"][-1]["command"] += secrets
    record["starts"][-1]["machine"]["node"] = "/srv/secretuser/x"
    (run / "run.json").write_text(json.dumps(record))
    assert run_here("report", run, "--out", page, "--device", "cpu").code == 0
    assert_nameless(tmp_path, page)
    assert "of x -o x x x" in page.read_text()


def test__what_earlier_versions_wrote_is_written_again_without_places(
    run_here: RunHere, run: Path, places: Places, tmp_path: Path
) -> None:
    """Weights, probes and feature files whose descriptions hold whole paths."""
    old, shared = places.project / "old", places.shared
    words = ["folder/knn", f"data={places.classes}", "image_size=8"]
    commands: list[list[object]] = [
        ["export", run, "--out", old / "encoder.safetensors"],
        ["evaluate", run, *words, "--out", old / "evaluated"],
        ["extract", run, places.photos, "--image-size", 32, "--out", old / "features.safetensors"],
    ]
    for command in commands:
        assert run_here(*command).code == 0
    for name, mark, change in (
        (
            "encoder.safetensors",
            "capi",
            {"config": {"evaluations": [{"benchmark": "folder/knn", "options": {"data": str(run)}}]}},
        ),
        ("evaluated/probe.safetensors", "capi_probe", {"about": {"model": str(run)}}),
        ("features.safetensors", "capi_features", {"about": {"model": str(run)}, "root": str(places.photos)}),
    ):
        redescribe(old / name, mark, change)
        assert b"secretproject" in (old / name).read_bytes() or b"secretdisk" in (old / name).read_bytes()
    commands = [
        ["export", old / "encoder.safetensors", "--out", shared / "encoder.safetensors"],
        ["export", old / "encoder.safetensors", "--format", "transformers", "--out", shared / "transformers"],
        ["predict", run, old / "evaluated" / "probe.safetensors", places.photos, "--out", shared / "labels"],
        ["nearest", old / "features.safetensors", places.photos / "0.png", "--out", shared / "sheet.png"],
    ]
    shared.mkdir()
    for command in commands:
        ran = run_here(*command)
        assert ran.code == 0, (command, ran.stderr)
    save_probe(load_probe(old / "evaluated" / "probe.safetensors"), shared / "probe.safetensors")
    write_parquet(read_features(old / "features.safetensors"), shared / "features.parquet")
    assert_nameless(tmp_path, *all_files(shared))


def redescribe(path: Path, mark: str, change: dict[str, Any]) -> None:
    """Change what a safetensors file says of itself."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    facts = json.loads(header["__metadata__"][mark])
    for name, value in change.items():
        # A section of a section, as in the config of a run.
        facts[name] = merged(facts[name], value) if isinstance(value, dict) else value
    header["__metadata__"][mark] = json.dumps(facts)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])


def merged(values: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    return values | {key: merged(values[key], each) if isinstance(each, dict) else each for key, each in change.items()}


def test__files_of_tensorboard_which_name_the_host_are_not_pushed(
    run_here: RunHere, places: Places, tmp_path: Path
) -> None:
    pytest.importorskip("tensorboard")
    noise_photos(places.photos)
    places.config.write_text(yaml.safe_dump(TREE))
    out, hub = places.run, places.shared / "hub"
    words = ["--data", places.photos, "--device", "cpu", "--out", out, "run.loggers=[tensorboard]"]
    assert run_here("pretrain", places.config, *words).code == 0
    # The library calls them so.
    assert all(HOST in path.name for path in (out / "tensorboard").iterdir())
    ran = run_here("push", out, "ann/model", "--dry-run", "--licence", "mit", "--out", hub)
    assert ran.code == 0, ran.stderr
    assert_nameless(tmp_path, *all_files(hub))
    assert not [path for path in all_files(hub) if "tfevents" in path.name]


def test__results_of_earlier_versions_are_shared_without_places(
    run_here: RunHere, run: Path, places: Places, tmp_path: Path
) -> None:
    evaluated, hub = places.project / "evaluated", places.shared / "hub"
    words = ["folder/knn", f"data={places.classes}", "image_size=8"]
    assert run_here("evaluate", run, *words, "--out", evaluated).code == 0
    record = json.loads((evaluated / "results.json").read_text())
    # As they were written before paths were hidden.
    record["model"] = str(run)
    record["config"]["data"] = str(places.classes)
    record["deviations"] = [f"classes of {places.classes} instead of the paper's", "read from /srv/ann secretuser/x"]
    record["scores"] = {f"top-1 of {places.classes}": 0.5}
    (evaluated / "results.json").write_text(json.dumps(record))
    ran = run_here("push", run, "ann/model", "--dry-run", "--licence", "mit", "--results", evaluated, "--out", hub)
    assert ran.code == 0, ran.stderr
    assert_nameless(tmp_path, *all_files(hub))
    assert "classes of classes instead of the paper" in (hub / "README.md").read_text()


def test__neighbors_are_found_by_a_file_that_names_no_place(
    run_here: RunHere, run: Path, places: Places, tmp_path: Path
) -> None:
    features, sheet = places.project / "features.safetensors", places.project / "sheet.png"
    assert run_here("extract", run, places.photos, "--image-size", 32, "--out", features).code == 0
    query = [features, places.photos / "0.png", "--model", run, "--out", sheet]
    ran = run_here("nearest", *query)
    assert ran.code == 0
    assert "there is no folder photos" in ran.stderr
    without = Image.open(sheet).convert("RGB").tobytes()
    ran = run_here("nearest", *query, "--images", places.photos, "--overwrite")
    assert (ran.code, ran.stderr) == (0, "")
    assert Image.open(sheet).convert("RGB").tobytes() != without
    assert_nameless(tmp_path, features, sheet)


@pytest.mark.thorough
def test__an_onnx_file_names_no_place(run_here: RunHere, run: Path, places: Places, tmp_path: Path) -> None:
    out = places.project / "encoder.onnx"
    ran = run_here("export", run, "--format", "onnx", "--out", out)
    assert ran.code == 0, ran.stderr
    assert_nameless(tmp_path, out)
    assert os.fsencode(Path(__file__).parents[2]) not in out.read_bytes()


def test__a_watched_run_is_shown_without_places(run: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-u", "-m", "capi", "watch", str(run)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        address = next(word for word in process.stdout.readline().split() if word.startswith("http://127.0.0.1:"))
        with urllib.request.urlopen(address, timeout=60) as answer:  # noqa: S310 - our own server
            (tmp_path / "page.html").write_bytes(answer.read())
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    finally:
        process.kill()
    assert b"images of photos" in (tmp_path / "page.html").read_bytes()
    assert_nameless(tmp_path, tmp_path / "page.html")


def test__a_watched_run_that_cannot_be_read_names_no_place(run: Path, tmp_path: Path) -> None:
    with WatchServer([run], port=0) as server:
        (run / "run.json").unlink()
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(server.address, timeout=60)  # noqa: S310 - our own server
    assert caught.value.code == 503
    (tmp_path / "answer.txt").write_bytes(caught.value.read())
    assert_nameless(tmp_path, tmp_path / "answer.txt")
    assert "cannot be read" in (tmp_path / "answer.txt").read_text()


@pytest.mark.thorough
def test__pages_of_a_study_name_no_place(run_here: RunHere, places: Places, tmp_path: Path) -> None:
    data, out = labeled_photos(places.disk / "photos"), places.project / "study"
    options = [word for option in QUICK for word in ("--option", option)]
    words = ["ablate", "sinkhorn", *SMALL, "--data", data, "--out", out, "--scale", "smoke", "--device", "cpu"]
    ran = run_here(*words, *options)
    assert ran.code == 0, ran.stderr
    pages = [path for path in out.iterdir() if path.is_file()]
    assert len(pages) == 3
    assert_nameless(tmp_path, *pages, *out.glob("runs/*/report.html"), *all_files(out / "scores"))


OWN = """
import torch
from capi.method.pixel_targets import PixelTargets


class Target(PixelTargets):
    \"\"\"Pixels by another name.\"\"\"


def mask(grid, count, keys):
    return (torch.arange(grid.rows * grid.columns) < count).expand(len(keys), -1)
"""


def own_components(places: Places) -> list[str]:
    """Overrides that name a target and a mask in a file, which lies where nobody else should look."""
    code = places.project / "own components.py"
    code.parent.mkdir(parents=True, exist_ok=True)
    code.write_text(OWN)
    names = {"target.kind": "Target", "masking.kind": "mask"}
    return [f"{key}={json.dumps(f'{code}:{name}')}" for key, name in names.items()]


def test__runs_with_components_of_ones_own_are_shared_without_places(
    run_here: RunHere, places: Places, tmp_path: Path
) -> None:
    noise_photos(places.photos)
    build_folder(places.classes)
    places.config.write_text(yaml.safe_dump(TREE))
    shared, words = places.shared, ["--data", places.photos, "--device", "cpu"]
    data = f"data={json.dumps(str(places.classes))}"
    first = places.project / "first"
    commands: list[list[object]] = [
        ["pretrain", places.config, *own_components(places), *words, "--out", places.run],
        ["report", places.run, "--out", shared / "report.html", "--device", "cpu"],
        ["export", places.run, "--out", shared / "encoder.safetensors"],
        ["export", places.run, "--format", "transformers", "--out", shared / "transformers"],
        ["evaluate", places.run, "folder/knn", data, "image_size=8", "--out", shared / "evaluated"],
        ["extract", places.run, places.photos, "--tile", "16", "--out", shared / "tiles"],
        ["push", places.run, "ann/model", "--space", "--dry-run", "--licence", "mit", "--out", shared / "hub"],
        # A run that starts from another, whose path its config holds.
        ["pretrain", places.config, *words, "--out", first],
        ["adapt", first, *words, "optimization.steps=1", "optimization.batch_size=4", "--out", places.project / "own"],
        ["report", places.project / "own", "--out", shared / "adapted.html", "--device", "cpu"],
        ["push", places.project / "own", "ann/own", "--dry-run", "--licence", "mit", "--out", shared / "own hub"],
    ]
    shared.mkdir()
    for command in commands:
        ran = run_here(*command)
        assert ran.code == 0, (command, ran.stderr)
    assert (shared / "hub-space" / "app.py").is_file()
    assert_nameless(tmp_path, *(path for path in all_files(shared) if "capi" not in path.relative_to(shared).parts))
    assert "(target.kind=own components.py:Target)" in (shared / "report.html").read_text()


def test__the_record_of_a_race_names_no_place_and_keeps_what_was_overridden(
    run_here: RunHere, places: Places, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = places.project / "fast.yaml"
    recipe.write_text(yaml.safe_dump(TREE | {"run": {"log_steps": 1}}))
    rules = replace(race.TRACKS["imagenette"], train_images=6, test_images=6, neighbors=1)
    monkeypatch.setitem(race.TRACKS, "imagenette", rules)
    for split in ("train", "val"):
        for label in "ab":
            noise_photos(places.disk / split / label, 3)
    words = ["speedrun", "imagenette", recipe, *own_components(places), "--data", places.disk, "--device", "cpu"]
    ran = run_here(*words, "--out", places.run)
    assert ran.code == 0, ran.stderr
    by_dict = {"model": {"depth": 1}, "seed": 3}
    race.speedrun("imagenette", str(recipe), by_dict, data=places.disk, out=places.project / "second", device="cpu")
    records = [places.run / race.RECORD, places.project / "second" / race.RECORD]
    assert_nameless(tmp_path, *records)
    first, second = (json.loads(record.read_text()) for record in records)
    assert first["recipe"] == "fast.yaml"
    assert [text.partition("=")[0] for text in first["overrides"]] == [
        "target.kind",
        "masking.kind",
    ]
    assert second["overrides"] == ["model.depth=1", "seed=3"]
