from pathlib import Path

import pytest

import capi
from capi.config.schema import Config
from capi.zoo.baselines.registry import BASELINES
from capi.zoo.published.registry import RELEASED
from tests.cli.conftest import RunHere
from tests.conftest import REFERENCE
from tests.zoo.test_weights import make_run

STUDENT = REFERENCE / "student.pth"


@pytest.fixture
def run(small_config: Config, tmp_path: Path) -> Path:
    return make_run(small_config, tmp_path / "run")


def test__models_are_listed_with_license_and_how_they_were_verified(run_here: RunHere) -> None:
    ran = run_here("models", "--all")
    assert ran.code == 0
    for word in ("capi_vitl14_lvd", "capi_vitl14_in22k", "ViT-L/14", "303 M", "LVD-142M", "Apache-2.0", "i22k.pth"):
        assert word in ran.stdout
    line = next(line for line in ran.stdout.splitlines() if line.startswith("capi_vitl14_p205"))
    assert " 35.2 / 79.2" in line
    said = " ".join(ran.stdout.split())
    assert "in percent: ADE20K, k-NN, mIoU / ImageNet-1k, attentive probe, accuracy." in said


def test__baselines_are_listed_with_where_their_weights_are(run_here: RunHere) -> None:
    said = " ".join(run_here("models", "--all").stdout.split())
    for word in ("mae_vitl16*", "aim_3b*", "dinov3_vitl16 ", "facebookresearch/ijepa", "non-commercial", "Apple's own"):
        assert word in said
    assert "layout from documentation, not verified with real weights" in said


@pytest.mark.parametrize("width", [80, 100])
def test__models_fit_a_terminal_and_no_name_is_cut(
    run_here: RunHere, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    lines = run_here("models", "--all").stdout.splitlines()
    assert max(map(len, lines)) <= width
    assert not [line for line in lines if "\N{HORIZONTAL ELLIPSIS}" in line]
    names = {line.split()[0].rstrip("*") for line in lines if line.strip()}
    assert names >= {*BASELINES, *RELEASED}


def test__without_all_the_list_fits_one_screen(run_here: RunHere, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = run_here("models").stdout.splitlines()
    assert len(lines) <= 22
    assert {*RELEASED} <= {line.split()[0] for line in lines if line}
    assert "capi models --all" in " ".join(lines)


def test__a_checkpoint_becomes_a_folder_that_loads(run_here: RunHere, tmp_path: Path) -> None:
    ran = run_here("export", STUDENT, "--format", "transformers", "--out", tmp_path / "out", "--image-size", 64)
    assert (ran.code, ran.stdout) == (0, f"wrote {tmp_path / 'out'}\n"), ran.stderr
    assert capi.load(tmp_path / "out").width == capi.load(STUDENT).width


def test__a_run_is_exported_into_itself_where_no_place_is_named(run_here: RunHere, run: Path) -> None:
    assert run_here("export", run).stdout == f"wrote {run / 'encoder.safetensors'}\n"
    again = run_here("export", run)
    assert again.code == 2
    assert "is there already" in again.stderr
    assert run_here("export", run, "--overwrite").code == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["export", STUDENT], "is no run folder to write into: name a run, or a file or folder to write with --out"),
        (["export", "capi_vitl14_lvdd", "--out", "OUT"], 'did you mean "capi_vitl14_lvd"'),
        (["export", STUDENT, "--out", "OUT", "--format", "onxx"], 'did you mean "onnx"'),
        (["export", STUDENT, "--out", "OUT", "--precision", "int4"], "--precision"),
        (["export", STUDENT, "--out", "OUT", "--format", "onnx", "--opset", "7"], "opset"),
        (["push", "RUN", "nobody"], "owner/name"),
        (["push", "RUN", "a/b", "--dry-run"], "needs a licence"),
        (["push", "RUN", "a/b", "--dry-run", "--licence", "mit", "--data-description", "nowhere.md"], "nowhere.md"),
    ],
)
def test__bad_input_ends_with_2_and_a_sentence(
    run_here: RunHere, run: Path, tmp_path: Path, arguments: list[object], message: str
) -> None:
    places = {"OUT": tmp_path / "out", "RUN": run}
    ran = run_here(*(places.get(word, word) if isinstance(word, str) else word for word in arguments))
    assert ran.code == 2
    assert message in ran.stderr
    assert not (tmp_path / "out").exists()


def test__a_dry_run_writes_the_folder_and_says_what_would_be_sent(run_here: RunHere, run: Path, tmp_path: Path) -> None:
    (tmp_path / "data.md").write_text("Photos of my garden.")
    ran = run_here(
        *("push", run, "ana/garden", "--dry-run", "--licence", "apache-2.0"),
        *("--data-description", tmp_path / "data.md"),
    )
    assert ran.code == 0, ran.stderr
    assert "nothing was sent" in ran.stdout
    assert "Photos of my garden." in (run / "hub" / "README.md").read_text()
