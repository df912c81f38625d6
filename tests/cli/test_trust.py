"""Python code that a config names runs only if the same command names it."""

import shutil
import sys
from collections.abc import Callable
from contextlib import chdir
from pathlib import Path

import pytest

import capi
from tests.api.studies import QUICK, labeled_photos
from tests.api.studies import SMALL as SMALL_STUDY
from tests.cli.conftest import RunHere, assert_refused
from tests.photos import noise_photos

SMALL = [
    *("data.image_size=16", "data.workers=0", "model.width=32", "model.depth=1", "model.heads=1", "model.patch_size=4"),
    *("masking.predict=2", "optimization.batch_size=4", "optimization.steps=2", "run.loggers=[]", "run.snapshots=0"),
]
CODE = """
from pathlib import Path
from capi.models.features import PixelEncoder

Path("marker").touch()

def make():
    return PixelEncoder(4)
"""


NAMED = ["target.kind=frozen", "target.frozen.encoder=evil.py:make"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images, a Python file that leaves a marker when it is imported, and a run whose config names that file."""
    folder = tmp_path_factory.mktemp("made")
    noise_photos(folder / "photos", size=(20, 20))
    (folder / "evil.py").write_text(CODE)
    with chdir(folder):
        capi.pretrain("tiny4", [*SMALL, *NAMED], data="photos", out="run", device="cpu")
    (folder / "marker").unlink()
    assert "evil.py:make" in (folder / "run" / "config.yaml").read_text()
    return folder


@pytest.fixture
def work(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it, where commands run."""
    folder = tmp_path / "work"
    shutil.copytree(made, folder)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place != str(made)])
    monkeypatch.delitem(sys.modules, "evil", raising=False)
    return folder


RESUME = ["pretrain", "run/config.yaml", "--data", "photos", "--out", "run", "--resume", "--device", "cpu"]
OTHERS = [
    ["pretrain", "run/config.yaml", "--data", "photos", "--out", "other", "--device", "cpu"],
    ["pretrain", "run/config.yaml", "--check", "--rounds", "1", "--device", "cpu"],
    ["pretrain", "extending.yaml", "--check", "--rounds", "1", "--device", "cpu"],
]


@pytest.mark.parametrize("words", [RESUME, *OTHERS])
def test__code_that_a_file_names_is_not_imported_unless_it_is_trusted(
    run_here: RunHere, work: Path, words: list[str]
) -> None:
    (work / "extending.yaml").write_text("extends: run/config.yaml\n")
    sentence = "the config names Python code in evil.py: look at it, then add --trust evil.py"
    assert_refused(run_here(*words), sentence)
    (work / "another.py").write_text("")
    assert_refused(run_here(*words, "--trust", "another.py"), sentence)
    assert not (work / "marker").exists()
    # Another path of the same file names it too.
    (work / "link.py").symlink_to(work / "evil.py")
    ran = run_here(*words, "--trust", "another.py", "--trust", work / "photos" / ".." / "link.py")
    assert ran.code == 0, ran.stderr
    assert (work / "marker").exists()


@pytest.mark.parametrize("name", ["evil.py:make", "evil:make"])
def test__weights_to_start_from_are_no_way_around_it(run_here: RunHere, work: Path, name: str) -> None:
    (work / "recipe.yaml").write_text(f"extends: tiny4\ninit: {{encoder: '{name}'}}\n")
    words = ["pretrain", "recipe.yaml", *SMALL, "--data", "photos", "--out", "started", "--device", "cpu"]
    code = name.partition(":")[0]
    assert_refused(run_here(*words), f"the config names Python code in {code}: look at it, then add --trust {code}")
    assert not (work / "marker").exists()
    assert_refused(run_here(*words, "--trust", code), "is a PixelEncoder, whose weights a run cannot start from")
    assert (work / "marker").exists()


LOOKING: list[list[str]] = [
    ["report", "run"],
    ["doctor", "run"],
    ["export", "run", "--out", "weights.safetensors"],
    ["evaluate", "run", "folder/knn", "data=classes", "image_size=8"],
    ["evaluate", "untrained:run", "folder/knn", "data=classes", "image_size=8"],
    ["compare", "run", "--on", "folder/knn", "--out", "compared", "data=classes", "image_size=8"],
    ["extract", "run", "photos", "--image-size", "8", "--out", "features.safetensors"],
    ["visualize", "run", "photos", "--size", "16", "--out", "pictures"],
    ["push", "run", "me/model", "--dry-run", "--licence", "mit", "--out", "pushed"],
    ["pretrain", "tiny4", *SMALL, "init.encoder=run", "--check", "--rounds", "1"],
]


@pytest.mark.parametrize("words", LOOKING, ids=lambda words: f"{words[0]} {words[1]}")
def test__looking_at_a_run_needs_none_of_its_code(
    run_here: RunHere, work: Path, class_folders: Path, words: list[str]
) -> None:
    (work / "classes").symlink_to(class_folders)
    ran = run_here(*words)
    assert ran.code in (0, 1) if words[0] == "doctor" else ran.code == 0, ran.stderr
    assert not (work / "marker").exists()


def test__an_export_of_such_a_run_runs_nothing_when_it_is_loaded(run_here: RunHere, work: Path) -> None:
    assert run_here("export", "run", "--out", "weights.safetensors").code == 0
    capi.load("weights.safetensors")
    capi.load("run")
    assert not (work / "marker").exists()


def test__an_override_names_the_code_in_this_very_command(run_here: RunHere, work: Path) -> None:
    words = ["pretrain", "tiny4", *SMALL, *NAMED, "--data", "photos", "--out", "run", "--resume", "--device", "cpu"]
    assert run_here(*words).code == 0
    assert (work / "marker").exists()


def test__overrides_of_demo_and_ablate_name_it_too(run_here: RunHere, work: Path) -> None:
    sentence, start = "is a PixelEncoder, whose weights a run cannot start from", "init.encoder=evil.py:make"
    assert_refused(run_here("demo", start, "data.workers=0", "--out", "demo", "--device", "cpu"), sentence)
    assert (work / "marker").exists()
    data = labeled_photos(work / "labelled")
    options = [word for option in QUICK for word in ("--option", option)]
    words = ["sinkhorn", *SMALL_STUDY, start, "--data", data, "--out", "study", "--scale", "smoke", *options]
    assert sentence in run_here("ablate", *words, "--device", "cpu").stderr


def test__functions_trust_the_files_they_are_given(work: Path) -> None:
    config = capi.load_config("tiny4", [*SMALL, *NAMED])
    call: Callable[..., object] = lambda out, **options: capi.pretrain(  # noqa: E731
        config, data="photos", out=out, device="cpu", **options
    )
    with pytest.raises(capi.CapiError, match=r"names Python code in evil\.py.*trust='evil\.py'"):
        call("a")
    with pytest.raises(capi.CapiError, match=r"names Python code in evil\.py"):
        capi.check(config, device="cpu", rounds=1)
    assert not (work / "marker").exists()
    call("a", trust="evil.py")
    call("b", trust=[work / "evil.py"])
    capi.check(config, device="cpu", rounds=1, trust=Path("evil.py"))


def test__a_job_carries_what_was_trusted(run_here: RunHere, work: Path) -> None:
    words = ["demo", "--gpus-per-node", "1", "--data", "demo", "--out", "run", "--trust", "evil.py", "--dry-run"]
    assert f"--data demo --trust {work}/evil.py --out {work}/run --resume" in run_here("launch", "slurm", *words).stdout
