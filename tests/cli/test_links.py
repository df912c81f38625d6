"""A run folder or a folder of results from a stranger: links in it lead to nothing being written or read elsewhere."""

import shutil
from pathlib import Path

import pytest

from tests.cli.conftest import RunHere, assert_refused
from tests.cli.tiny_runs import train
from tests.photos import noise_photos

FILES = (
    "config.yaml",
    "run.json",
    "metrics.jsonl",
    "report.html",
    ".lock",
    ".run.json.partial",
    ".report.html.partial",
    "pictures/curves.png",
    "pictures/snapshots/step_00000002_0.png",
)
FOLDERS = ("checkpoints", "pictures", "pictures/prototypes", "tensorboard", "replay")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with images, a config and a run of them; not to be changed."""
    work = tmp_path_factory.mktemp("work")
    train(work / "run", noise_photos(work / "images"), work / "tiny.yaml")
    return work


@pytest.fixture
def work(trained: Path, tmp_path: Path, class_folders: Path, mask_folders: Path) -> Path:
    shutil.copytree(trained, tmp_path / "work")
    (tmp_path / "work" / "classes").symlink_to(class_folders)
    (tmp_path / "work" / "masks").symlink_to(mask_folders)
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "precious").write_text("precious")
    return tmp_path / "work"


def commands(work: Path) -> dict[str, list[object]]:
    """Every way to open a run, each with a place of its own for what it writes."""
    run, out = work / "run", work / "out"
    benchmark = ["folder/knn", f"data={work / 'classes'}", "image_size=8"]
    resume = ["--data", work / "images", "--out", run, "--resume", "--device", "cpu"]
    return {
        "report": ["report", run, "--device", "cpu"],
        "resume": ["pretrain", work / "tiny.yaml", *resume],
        "overwrite": ["pretrain", work / "tiny.yaml", *resume[:-3], "--overwrite", "--device", "cpu"],
        "init": ["pretrain", work / "tiny.yaml", *resume[:2], "--out", out / "init", f"init.encoder={run}"],
        "evaluate": ["evaluate", run, *benchmark, "--out", out / "evaluated"],
        "export": ["export", run, "--out", out / "encoder.safetensors"],
        "export into the run": ["export", run],
        "visualize": ["visualize", run, "--out", out / "pictures"],
        "doctor": ["doctor", run],
        "push": ["push", run, "ann/model", "--dry-run", "--licence", "mit"],
        "extract": ["extract", run, work / "images", "--out", out / "features.safetensors"],
        "watch": ["watch", run],
    }


def content(folder: Path) -> dict[str, bytes | None]:
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def move_out(path: Path, outside: Path, *, folder: bool) -> None:
    """What lies there goes elsewhere, and a link leads to it."""
    target = outside / path.name.lstrip(".")
    if path.exists():
        path.rename(target)
    elif folder:
        target.mkdir()
    else:
        target.write_text("precious")
    path.parent.mkdir(exist_ok=True)
    path.symlink_to(target)


@pytest.mark.parametrize("name", [*FILES, *FOLDERS])
def test__no_command_follows_a_link_out_of_a_run(run_here: RunHere, work: Path, name: str) -> None:
    outside = work.parent / "outside"
    move_out(work / "run" / name, outside, folder=name in FOLDERS)
    before = content(outside)
    for command in commands(work).values():
        assert_refused(run_here(*command), f"leads out of it ({name})")
        assert content(outside) == before
        assert (work / "run" / name).is_symlink()
    assert not list((work / "out").rglob("*"))


def test__a_file_of_the_system_is_not_read_as_a_config(run_here: RunHere, work: Path) -> None:
    (work / "run" / "config.yaml").unlink()
    (work / "run" / "config.yaml").symlink_to("/etc/passwd")
    for command in commands(work).values():
        ran = run_here(*command)
        assert_refused(ran, "leads out of it (config.yaml)")
        assert "root:" not in ran.stderr


def test__links_inside_a_run_and_to_a_run_are_fine(run_here: RunHere, work: Path) -> None:
    disk = work.parent / "disk"
    disk.mkdir()
    (work / "run").rename(disk / "run")
    (work / "run").symlink_to(disk / "run")
    (disk / "run" / "newest").symlink_to("checkpoints/step_00000002")
    wanted = commands(work)
    for name in ("resume", "report", "doctor", "export", "evaluate"):
        ran = run_here(*wanted[name])
        assert ran.code == 0, (name, ran.stderr)
    assert (disk / "run" / "report.html").is_file()
    ran = run_here(*wanted["overwrite"])
    assert ran.code == 0, ran.stderr
    assert (work / "run").is_symlink()
    assert (disk / "run" / "config.yaml").is_file()
    assert not (disk / "run" / "newest").is_symlink()
    assert [path.name for path in disk.iterdir()] == ["run"]


def test__a_report_replaces_a_link_that_a_user_names(run_here: RunHere, work: Path) -> None:
    precious, out = work.parent / "outside" / "precious", work / "page.html"
    for link in (out, out.with_name(".page.html.partial")):
        link.symlink_to(precious)
    assert run_here("report", work / "run", "--out", out, "--device", "cpu").code == 0
    assert precious.read_text() == "precious"
    assert not out.is_symlink()


@pytest.mark.parametrize("format", ["safetensors", "released"])
def test__an_export_writes_through_no_link(run_here: RunHere, work: Path, format: str) -> None:
    precious, out = work.parent / "outside" / "precious", work / "encoder"
    for link in (out, out.with_name(".encoder.partial")):
        link.symlink_to(precious)
    assert run_here("export", work / "run", "--format", format, "--out", out, "--overwrite").code == 0
    assert precious.read_text() == "precious"
    assert not out.is_symlink()


def test__results_are_written_through_no_link(run_here: RunHere, work: Path) -> None:
    outside, out = work.parent / "outside", work / "out"
    out.mkdir()
    for name in ("results.json", "results.md", "probe.safetensors", ".results.json.partial"):
        (out / name).symlink_to(outside / "precious")
    for name in ("predictions", ".features"):
        (out / name).symlink_to(outside)
    before = content(outside)
    options = [f"data={work / 'masks'}", "image_size=8", "ignored=[255]", "pictures=1"]
    ran = run_here("evaluate", "pixels:2", "masks/knn-segmentation", *options, "--out", out, "--overwrite")
    assert ran.code == 0, ran.stderr
    assert content(outside) == before
    assert list((out / "predictions").glob("*.png"))
    labels = work / "labelled"
    labels.mkdir()
    for name in ("labels", "overlays"):
        (labels / name).symlink_to(outside)
    for name in ("legend.png", "classes.csv", ".classes.csv.partial"):
        (labels / name).symlink_to(outside / "precious")
    probe = [out / "probe.safetensors", work / "masks" / "images" / "val", "--out", labels, "--overwrite"]
    ran = run_here("predict", "pixels:2", *probe)
    assert ran.code == 0, ran.stderr
    assert content(outside) == before
    assert list((labels / "labels").rglob("*.png"))


def test__pictures_are_drawn_through_no_link(run_here: RunHere, work: Path) -> None:
    outside, out = work.parent / "outside", work / "out"
    out.mkdir()
    (out / "pca").symlink_to(outside)
    (out / "index.html").symlink_to(outside / "precious")
    before = content(outside)
    ran = run_here("visualize", "pixels:2", work / "images", "--out", out, "--size", 8, "--overwrite")
    assert ran.code == 2
    assert "through a symbolic link: remove the link" in ran.stderr
    (out / "pca").unlink()
    ran = run_here("visualize", "pixels:2", work / "images", "--out", out, "--size", 8, "--overwrite")
    assert ran.code == 0, ran.stderr
    assert content(outside) == before


@pytest.mark.parametrize("name", [".f.safetensors.partial", ".f.safetensors.partial/.lock"])
def test__features_are_written_through_no_link(run_here: RunHere, work: Path, name: str) -> None:
    outside = work.parent / "outside"
    link = work / name
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(outside / "precious" if link.name == ".lock" else outside)
    before = content(outside)
    ran = run_here("extract", "pixels:2", work / "images", "--image-size", 8, "--out", work / "f.safetensors")
    assert ran.code == 2
    assert "is a symbolic link" in ran.stderr
    assert content(outside) == before


def test__what_killed_processes_left_in_a_run_is_removed(run_here: RunHere, work: Path) -> None:
    pictures = work / "run" / "pictures"
    left = [pictures / name for name in (".prototypes.partial-123", ".prototypes.0123456789abcdef.partial")]
    for folder in left:
        folder.mkdir()
        (folder / "00001.png").touch()
    left.append(work / "run" / ".report.html.0123456789abcdef.partial")
    left[-1].touch()
    assert run_here("report", work / "run", "--device", "cpu").code == 0
    assert not [path for path in left if path.exists()]
    assert (pictures / "prototypes" / "index.json").exists()
