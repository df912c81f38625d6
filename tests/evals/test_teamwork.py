"""Real processes, started by torchrun: what they leave must be what one process leaves."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

import capi
from capi.api.comparison import compare
from capi.api.evaluation import evaluate
from capi.config.files import parse_config
from capi.data.locations import list_images
from capi.errors import CapiError
from capi.evals.extraction import extract_features
from capi.evals.features import Encoding
from capi.evals.team import lead_encoding, prepared, sources_of
from capi.models.features import PixelEncoder
from capi.runtime.atomic import Output
from capi.runtime.processes import ALONE
from tests.data.pictures import photo
from tests.evals.toys import colored_data
from tests.zoo.test_weights import make_run

KINDS = ("patch", "mean_patch", "pooled", "register")
BROKEN_ENCODER = """
import torch
from capi.types import Features


class Broken(torch.nn.Module):
    width, patch_size = 3, 4

    def forward(self, images, *, pooled=True):
        means = torch.nn.functional.avg_pool2d(images, 4)
        # No number where there are two images in a batch.
        return Features(None, torch.zeros(len(images), 0, 3), means.permute(0, 2, 3, 1) / (len(images) - 2))
"""
# Of 18 training images, 12 with masks, and 6 and 4 to test: neither batches nor processes divide them.
EVALUATIONS: dict[str, list[str]] = {
    "knn": ["folder/knn", "encode_batch=4"],
    "linear": ["folder/linear", "iterations=5", "learning_rates=[0.01]", "encode_batch=7"],
    "streamed": ["folder/attentive", "schedule=paper", "iterations=4", "batch_size=8", "encode_batch=3", "workers=1"],
    "logistic": ["masks/logistic-segmentation", "ignored=[255]", "max_iterations=20", "encode_batch=5", "pictures=2"],
}


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory, class_folders: Path, mask_folders: Path) -> Path:
    """A small encoder and data."""
    folder = tmp_path_factory.mktemp("together")
    small = {
        "data": {"image_size": 16},
        "model": {"width": 16, "depth": 1, "heads": 2, "patch_size": 4, "registers": 2},
        "clustering": {"prototypes": 8},
    }
    torch.manual_seed(0)
    make_run(parse_config(small), folder / "run")
    (folder / "folder").symlink_to(class_folders)
    (folder / "masks").symlink_to(mask_folders)
    (folder / "broken.py").write_text(BROKEN_ENCODER)
    for number in range(11):
        place = folder / "photos" / f"{number:02d}.png"
        place.parent.mkdir(exist_ok=True)
        Image.fromarray(photo(24 + number, 30, number)).save(place)
    shutil.copytree(folder / "photos", folder / "damaged")
    # The third batch of three, of the third process.
    (folder / "damaged" / "07.png").write_bytes(b"no picture")
    return folder


def torchrun(count: int, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(count), "-m", *words]
    root = str(Path(__file__).parents[2])
    surroundings = os.environ | {"PYTHONPATH": root, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, cwd=folder, env=surroundings, capture_output=True, text=True, check=False, timeout=900
    )


def options(work: Path, words: list[str]) -> list[str]:
    return [*words[1:], f"data={work / words[0].split('/')[0]}", "image_size=16"]


def unfinished(work: Path, out: Path) -> None:
    """What an extraction by one process leaves that ends after the second batch of three."""

    class Interruption(Exception):  # noqa: N818
        pass

    def progress(_what: str, done: int, _total: int) -> None:
        if done >= 9:
            raise Interruption

    listed = list_images(str(work / "photos"))
    named = {"model": str(work / "run"), "weights": "teacher", "data": str(work / "photos"), "split": None}
    encoding = Encoding(size=(16, 16), batch_size=3, progress=progress)
    with pytest.raises(Interruption):
        extract_features(
            capi.load(work / "run"), listed.images, Output(out), encoding=encoding, kinds=KINDS, about=named
        )


def extraction(work: Path, data: str, out: str) -> list[str]:
    kinds = [word for kind in KINDS for word in ("--kind", kind)]
    words = ["extract", str(work / "run"), str(work / data), "--out", str(work / "three" / out), *kinds]
    return [*words, "--image-size", "16", "--batch-size", "3", "--device", "cpu"]


@pytest.fixture(scope="module")
def three(work: Path) -> Callable[[str], list[dict[str, Any]]]:
    """What each of three processes says to a command."""
    folder, run = work / "three", str(work / "run")
    folder.mkdir()
    unfinished(work, folder / "resumed.safetensors")
    before = json.loads((folder / ".resumed.safetensors.partial" / "progress.json").read_text())["done"]
    assert before == 6
    few = [f"data={work / 'folder'}", "encode_batch=2"]
    commands = {
        # Those that fail come first: nothing of them may be left over in what follows.
        "missing": ["evaluate", run, "folder/knn", "data=nowhere"],
        # The main process's own batch fails while the others wait to be asked for theirs.
        "broken": ["evaluate", f"{work / 'broken.py'}:Broken", "folder/knn", *few],
        "other data": ["evaluate", run, "folder/knn", f"data={work / 'own'}RANK"],
        "alone": ["explore", run],
        "damaged": extraction(work, "damaged", "damaged.safetensors"),
        **{
            name: ["evaluate", run, words[0], *options(work, words), "--out", str(folder / name), "--device", "cpu"]
            for name, words in EVALUATIONS.items()
        },
        "again": ["evaluate", run, "folder/knn", f"data={work / 'folder'}", "--out", str(folder / "knn")],
        "resumed": extraction(work, "photos", "resumed.safetensors"),
    }
    for rank in range(3):
        shutil.copytree(work / "folder", work / f"own{rank}")
    (work / "own2" / "train" / "ant" / "0.png").rename(work / "own2" / "train" / "ant" / "z.png")
    (folder / "commands.json").write_text(json.dumps(commands))
    ran = torchrun(3, folder, "tests.api.commands_together", str(folder))
    assert ran.returncode == 0, ran.stderr
    left = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(3)]
    assert all(process["tensors"] for process in left)
    return lambda name: [process["commands"][name] for process in left]


def assert_refused(ended: list[dict[str, Any]], *words: str) -> None:
    """All end with 2, and the main one says why."""
    assert [process["code"] for process in ended] == [2, 2, 2]
    message = " ".join(ended[0]["errors"].split())
    assert message.startswith("Error: ")
    for word in words:
        assert word in message
    assert [(process["errors"], process["out"]) for process in ended[1:]] == [("", ""), ("", "")]


@pytest.mark.long
@pytest.mark.parametrize("name", EVALUATIONS)
def test__evaluations_leave_what_one_process_leaves(
    three: Callable[[str], list[dict[str, Any]]], work: Path, tmp_path: Path, name: str
) -> None:
    ended = three(name)
    assert [process["code"] for process in ended] == [0, 0, 0], ended
    assert "has results.json" in ended[0]["out"]
    assert [(process["errors"], process["out"]) for process in ended[1:]] == [("", ""), ("", "")]
    words = EVALUATIONS[name]
    alone = evaluate(str(work / "run"), words[0], options(work, words), out=tmp_path)
    ours, theirs = (json.loads((folder / "results.json").read_text()) for folder in (work / "three" / name, tmp_path))
    for record in (ours, theirs):
        assert record.pop("seconds") > 0
        del record["date"]
    assert ours == theirs
    assert ours["scores"] == alone.outcome.scores
    files = sorted(
        path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.suffix in {".png", ".safetensors"}
    )
    assert len(files) == (3 if name == "logistic" else 1)
    for file in files:
        assert (work / "three" / name / file).read_bytes() == (tmp_path / file).read_bytes()
    written = sorted(path.relative_to(work / "three" / name) for path in (work / "three" / name).rglob("*"))
    assert written == sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*"))


@pytest.mark.long
def test__an_extraction_is_that_of_one_process_also_where_one_began_it(
    three: Callable[[str], list[dict[str, Any]]], work: Path, tmp_path: Path
) -> None:
    ended, name = three("resumed"), "resumed.safetensors"
    assert [process["code"] for process in ended] == [0, 0, 0], ended
    assert ["wrote" in process["out"] for process in ended] == [True, False, False]
    capi.extract(work / "run", work / "photos", out=tmp_path / name, kinds=KINDS, image_size=16, batch_size=3)
    assert (work / "three" / name).read_bytes() == (tmp_path / name).read_bytes()
    assert not (work / "three" / f".{name}.partial").exists()


@pytest.mark.long
def test__one_process_continues_where_three_failed(
    three: Callable[[str], list[dict[str, Any]]], work: Path, tmp_path: Path
) -> None:
    assert_refused(three("damaged"), "damaged/07.png cannot be read")
    out = work / "three" / "damaged.safetensors"
    shutil.copy(work / "photos" / "07.png", work / "damaged" / "07.png")
    settings = {"kinds": KINDS, "image_size": 16, "batch_size": 3}
    done = capi.extract(work / "run", work / "damaged", out=out, **settings)
    assert done.resumed_at == 6
    capi.extract(work / "run", work / "damaged", out=tmp_path / "x.safetensors", **settings)
    assert out.read_bytes() == (tmp_path / "x.safetensors").read_bytes()


@pytest.mark.long
def test__bad_input_is_reported_once(three: Callable[[str], list[dict[str, Any]]], work: Path) -> None:
    assert_refused(three("missing"), "nowhere is missing")
    assert_refused(three("broken"), "the encoder gives values that are no finite numbers")
    assert_refused(three("other data"), "process 2 was started with another data than process 0")
    assert_refused(three("alone"), "capi explore works in one process, but 3 were started")
    assert_refused(three("again"), "--overwrite")


@pytest.mark.long
def test__a_comparison_is_that_of_one_process_and_a_cell_that_fails_is_reported_once(
    work: Path, tmp_path: Path
) -> None:
    models = [str(work / "run"), f"{work / 'broken.py'}:Broken"]
    yaml = {
        "knn.yaml": f"benchmark: folder/knn\ndata: {work / 'folder'}\nencode_batch: 4\n",
        "masks.yaml": f"benchmark: masks/logistic-segmentation\ndata: {work / 'masks'}\nignored: [255]\n",
    }
    for name, text in yaml.items():
        (work / name).write_text(text)
    benchmarks = [str(work / name) for name in yaml]
    small = ["image_size=16", "max_iterations=9"]
    words = ["compare", *models, "--on", *benchmarks, "--out", str(work / "two"), *small, "--device", "cpu"]
    ran = torchrun(2, work, "capi", *words)
    assert ran.returncode != 0
    assert ran.stdout.count("values that are no finite numbers") == 1, ran
    assert ran.stdout.count("comparison.html shows it") == 1
    assert "Traceback" not in ran.stderr.partition("torch/distributed/elastic")[0]
    alone = compare(models, benchmarks, small, out=tmp_path / "one")
    ours, theirs = (json.loads((folder / "comparison.json").read_text()) for folder in (work / "two", tmp_path / "one"))
    assert [cell["status"] for cell in theirs["cells"]] == ["done", "done", "failed", "done"]
    for record in (ours, theirs):
        del record["date"]
        for results in [cell["results"] for cell in record["cells"] if cell["results"]]:
            del results["seconds"], results["date"]
    assert ours == theirs
    for cell in alone.done:
        probes = [folder / cell.folder / "probe.safetensors" for folder in (work / "two", tmp_path / "one")]
        assert probes[0].read_bytes() == probes[1].read_bytes()


def test__one_process_evaluates_as_it_did() -> None:
    encoding = Encoding(size=(8, 8))
    with lead_encoding(ALONE, PixelEncoder(4), [], encoding) as work:
        assert work.encoding is encoding
    with pytest.raises(CapiError, match="as it is"), prepared(ALONE):
        raise CapiError("as it is")


def test__all_processes_count_sources_in_one_order() -> None:
    data = colored_data()
    assert sources_of(data) == [data.train.images, data.tests["test"].images]
