"""The package as it is imported and shipped."""

import importlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

import capi
from capi import api
from capi.config.schema import Config
from capi.zoo.baselines.registry import BASELINES
from tests.photos import noise_photos
from tests.zoo.baseline_checkpoints import original, random_model
from tests.zoo.test_weights import make_run

ROOT = Path(__file__).parent.parent


def test__importing_capi_imports_nothing_heavy() -> None:
    code = "import sys, capi; print([n for n in ('torch', 'numpy', 'pydantic', 'yaml', 'typer') if n in sys.modules])"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert output.stdout.strip() == "[]"


@pytest.mark.parametrize("words", [["--help"], ["recipes"], ["pretrain", "--help"]], ids=" ".join)
def test__help_and_recipes_do_not_wait_for_torch(words: list[str]) -> None:
    code = (
        "import sys, atexit; sys.argv[0] = 'capi'; "
        "atexit.register(lambda: print('torch' in sys.modules)); from capi.cli import main; main()"
    )
    output = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=True)
    assert output.stdout.splitlines()[-1] == "False"


# What loading a model must not wait for: reports, the explorer, the planner, and what talks to the Hub.
_NOT_LOADED = (
    "capi.report",
    "capi.train.cost",
    "capi.zoo.published.cache",
    "capi.zoo.published.hub",
    "huggingface_hub",
)


def test__loading_a_run_imports_little_of_the_package(small_config: Config, tmp_path: Path) -> None:
    assert_imports_little(str(make_run(small_config, tmp_path / "run")))


def test__loading_a_baseline_from_a_file_imports_little_of_the_package(tmp_path: Path) -> None:
    baseline = BASELINES["dinov2_reg_vits14"]
    torch.save(original(baseline, random_model(baseline)), tmp_path / "file.pth")
    assert_imports_little(f"baseline:dinov2_reg_vits14={tmp_path / 'file.pth'}")


def assert_imports_little(model: str) -> None:
    code = "import sys, capi; capi.load(sys.argv[1]); print(*sys.modules)"
    output = subprocess.run([sys.executable, "-c", code, model], capture_output=True, text=True, check=True)
    modules = output.stdout.split()
    assert not [name for name in modules if name.startswith(_NOT_LOADED)]
    ours = [name for name in modules if name == "capi" or name.startswith("capi.")]
    assert len(ours) <= 80, ours


def test__every_public_name_is_there() -> None:
    assert set(capi.__all__) <= set(dir(capi))
    for name in capi.__all__:
        assert getattr(capi, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = capi.nonsense


def test__every_name_that_the_command_line_takes_from_api_is_there() -> None:
    assert set(capi.__all__) - {"__version__"} < set(dir(api))
    for name in dir(api):
        assert getattr(api, name) is not None


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of this checkout, installed into a folder of its own."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    subprocess.run([*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", str(folder), str(ROOT)], check=True)
    (wheel,) = folder.glob("capi-*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--target", str(folder / "site"), str(wheel)], check=True)
    return folder


def test__the_wheel_runs_outside_the_checkout(installed: Path) -> None:
    code = (
        "import sys, capi; from capi.cli import main; assert capi.__file__.startswith(sys.argv[1]), capi.__file__; "
        "sys.argv[1:] = ['recipes', 'show', 'vitl14']; main()"
    )
    site = str(installed / "site")
    output = subprocess.run(
        [sys.executable, "-c", code, site],
        cwd=installed,
        env={"PYTHONPATH": site, "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "width: 1024" in output.stdout


def test__the_wheel_holds_the_package_and_nothing_else(installed: Path) -> None:
    (wheel,) = installed.glob("capi-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert "capi/config/recipes/vitl14.yaml" in names
    assert all(name.startswith(("capi/", f"capi-{capi.__version__}.dist-info/")) for name in names)
    assert not [name for name in names if "/test" in name or "__pycache__" in name]


def test__the_core_install_is_small() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = {re.split(r"[<>=]", requirement)[0] for requirement in project["dependencies"]}
    assert names == {
        "filelock",
        "jinja2",
        "numpy",
        "pillow",
        "pydantic",
        "pyyaml",
        "rich",
        "safetensors",
        "torch",
        "typer",
    }


def _python_in(*names: str) -> list[str]:
    return [code for name in names for code in re.findall(r"```python\n(.*?)```", (ROOT / name).read_text(), re.DOTALL)]


@pytest.mark.parametrize("page", ["README.md", "docs/guides/evaluation.md", "docs/start/weights.md"])
def test__python_in_the_documentation_runs_as_written(page: str) -> None:
    """One block after the other in one process, each with names of its own."""
    blocks = _python_in(page)
    assert blocks
    code = f"for block in {blocks!r}:\n    exec(compile(block, block[:80], 'exec'), {{}})"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test__the_encoder_of_the_documentation_can_be_evaluated(tmp_path: Path) -> None:
    (code,) = [code for code in _python_in("docs/guides/evaluation.md") if "my_encoder.py" in code]
    (tmp_path / "my_encoder.py").write_text(code)
    options = ["tests=[val]", "image_size=32", "limit_train=100"]
    done = capi.evaluate(f"{tmp_path}/my_encoder.py:Thumbnails", "demo/knn", options)
    assert done.record["scores"]["val"] > 1 / 14
    assert len([line for line in code.split("class")[1].splitlines() if line.strip()]) <= 10


@pytest.mark.thorough
def test__python_in_the_document_about_formats_runs_as_written(tmp_path: Path) -> None:
    """Each format by its own ecosystem's code, one block after the other; the published model is a small one."""
    student = ROOT / "tests" / "reference" / "tiny" / "student.pth"
    for name in ("student.pth", "encoder.pth"):
        shutil.copy(student, tmp_path / name)
    pixels = np.random.default_rng(0).integers(0, 255, (70, 90, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "photo.jpg")
    capi.export(student, tmp_path / "my-model", format="transformers", image_size=64)
    (tmp_path / "path" / "to" / "this").mkdir(parents=True)
    (tmp_path / "path" / "to" / "this" / "repository").symlink_to(ROOT)
    cache = tmp_path / "home" / "hub" / "checkpoints"
    cache.mkdir(parents=True)
    shutil.copy(student, cache / "capi_vitl14_lvd.pth")
    home = str(tmp_path / "home")
    places = os.environ | {"TORCH_HOME": home, "HF_HOME": home, "HF_HUB_OFFLINE": "1"}
    blocks = _python_in("docs/guides/export.md")
    assert len(blocks) >= 6
    for code in blocks:
        ran = subprocess.run(
            [sys.executable, "-c", code], cwd=tmp_path, env=places, check=False, capture_output=True, text=True
        )
        assert ran.returncode == 0, f"{code}\n{ran.stderr}"


_ONE_AFTER_THE_OTHER = """
import sys
from capi.cli import main

for line in sys.stdin.read().splitlines():
    sys.argv = line.split()
    try:
        main()
    except SystemExit as ended:
        assert not ended.code, f"{line} ended with {ended.code}"
"""


def _run_one_after_the_other(lines: list[str], folder: Path) -> None:
    """In one process, since each would wait for torch again, beside a folder of photos."""
    noise_photos(folder / "photos", 20, (48, 64), ending="jpg")
    command = [sys.executable, "-c", _ONE_AFTER_THE_OTHER]
    result = subprocess.run(command, cwd=folder, check=False, capture_output=True, text=True, input="\n".join(lines))
    assert result.returncode == 0, result.stderr


# What would take minutes, in seconds.
_SHORT = " optimization.steps=2 optimization.batch_size=8 clustering.prototypes=32"


def test__commands_in_the_readme_run_in_their_order(tmp_path: Path) -> None:
    lines = re.findall(r"^capi .*$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert len(lines) > 10
    _run_one_after_the_other([line + _SHORT if line.startswith("capi pretrain") else line for line in lines], tmp_path)


def test__the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().split()) < 900


@pytest.mark.thorough
@pytest.mark.parametrize("page", sorted((ROOT / "docs" / "start").glob("*.md")), ids=lambda page: page.stem)
def test__commands_of_the_first_pages_run_in_their_order(page: Path, tmp_path: Path) -> None:
    blocks = re.findall(r"```sh\n(.*?)```", page.read_text(), re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    lines = [line + _SHORT if line.startswith("capi pretrain") else line for line in lines]
    if lines:
        _run_one_after_the_other(lines, tmp_path)
    assert lines or page.stem == "channels", "a page without a command that can be tried"


def test__the_reference_cuts_no_summary_and_writes_values_as_yaml_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    reference = importlib.import_module("reference")
    summaries = re.findall(r"^\* `[a-z]+`: (.*)$", reference.commands(), re.MULTILINE)
    assert len(summaries) > 20
    assert not [summary for summary in summaries if summary.endswith("...")]
    defaults = re.findall(r"^\| `([\w.]+)` \| .* \| `(.*?)` \| ", reference.config(), re.MULTILINE)
    assert dict(defaults)["data.crop_aspect"] == "[0.75, 1.3333]"
    assert {type(yaml.safe_load(value)) for _, value in defaults} >= {bool, float, int, list, str, type(None)}


_SCHEMAS = {
    ".github/workflows/*.yml": "github-workflows",
    ".github/dependabot.yml": "dependabot",
    ".github/ISSUE_TEMPLATE/[bq]*.yml": "github-issue-forms",
    ".github/ISSUE_TEMPLATE/config.yml": "github-issue-config",
    "CITATION.cff": "citation-file-format",
}


@pytest.mark.parametrize("pattern", _SCHEMAS)
def test__files_for_the_repository_host_keep_their_schemas(pattern: str) -> None:
    files = [str(path) for path in ROOT.glob(pattern)]
    assert files
    check = Path(sys.executable).parent / "check-jsonschema"
    words = [check, "--builtin-schema", f"vendor.{_SCHEMAS[pattern]}", *files]
    result = subprocess.run(words, check=False, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize("folder", ["capi", "capi/api"])
def test__no_public_name_is_hidden_by_a_module(folder: str) -> None:
    modules = {
        path.stem for path in (ROOT / folder).iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()
    }
    # The package of reports can be called, see below.
    assert modules & set(capi.__all__) <= {"report"}


@pytest.mark.parametrize(
    "first",
    ["import capi", "import capi.report.doctor, capi"],
)
def test__report_is_a_function_whether_its_package_was_imported_or_not(first: str, tmp_path: Path) -> None:
    code = (
        f"{first}\n"
        "import sys\n"
        "for _ in range(2):\n"
        "    try:\n"
        "        capi.report(sys.argv[1], device='cpu')\n"
        "    except capi.CapiError as error:\n"
        "        print(error)\n"
        "from capi.report import run_report\n"
        "assert run_report.report\n"
    )
    run = [sys.executable, "-c", code, str(tmp_path)]
    output = subprocess.run(run, capture_output=True, text=True, check=True)
    assert len(output.stdout.splitlines()) == 2
    assert str(tmp_path) in output.stdout


# Type checkers of the test run would see these first, so they are tried without.
WRONG_TYPES = """
import numpy, torch, capi
encoder = capi.load("tests/reference/tiny/student.pth")
calls = {
    "array": lambda: encoder(numpy.zeros((1, 3, 64, 48))),
    "name": lambda: encoder("a.jpg"),
    "device": lambda: encoder(torch.zeros(1, 3, 64, 48, device="meta")),
    "load": lambda: capi.load(None),
    "empty": lambda: capi.load(""),
    "images": lambda: capi.transform(encoder)(5),
    "size": lambda: capi.transform(encoder, "a"),
    "encoder": lambda: capi.transform("x"),
    "override": lambda: capi.load_config("tiny4", [5]),
    "config": lambda: capi.build_learner("tiny4"),
    "data": lambda: capi.pretrain("tiny4", data=None, out="nowhere"),
    "out": lambda: capi.pretrain("tiny4", data="docs", out=5),
}
for name, call in calls.items():
    try:
        call()
    except capi.CapiError as error:
        print(name, "told", error)
"""


def test__values_of_wrong_types_are_bad_input() -> None:
    answers = subprocess.run([sys.executable, "-c", WRONG_TYPES], capture_output=True, text=True, check=True, cwd=ROOT)
    lines = answers.stdout.splitlines()
    names = "array name device load empty images size encoder override config data out"
    assert [line.split()[0] for line in lines] == names.split()
    assert all(" told " in line and (" must be " in line or ": " in line) for line in lines)
