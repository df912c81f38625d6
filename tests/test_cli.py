"""The command line as a user meets it: real processes, exit codes, what is printed where."""

import subprocess
import sys
from pathlib import Path

import pytest

import capi

SMALL = ["model.depth=1", "model.width=32", "model.heads=2", "clustering.prototypes=16", "optimization.batch_size=4"]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "capi", *arguments], capture_output=True, text=True, check=False)


def test__recipes_lists_every_recipe() -> None:
    result = run("recipes")
    assert result.returncode == 0
    for name in ("tiny4", "vitl14", "vits16"):
        assert name in result.stdout


def test__recipes_show_prints_comment_and_resolved_config() -> None:
    result = run("recipes", "show", "vits14", "seed=7")
    assert result.returncode == 0
    assert result.stdout.startswith("# CAPI ViT-S/14")
    assert "\nseed: 7\n" in result.stdout
    assert "extends" not in result.stdout
    # Inherited from vitl14, and from the defaults.
    assert "rope: released" in result.stdout
    assert "teacher_momentum: 0.998" in result.stdout


def test__check_reports_the_cost_of_a_step() -> None:
    result = run("check", "tiny4", *SMALL, "--rounds", "1", "--device", "cpu")
    assert result.returncode == 0, result.stderr
    for word in ("parameters", "GFLOP", "images/s", "peak memory", "20000 iterations"):
        assert word in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["recipes", "show", "vitl144"], 'did you mean "vitl14"?'),
        (["recipes", "show", "tiny4", "model.dept=3"], 'did you mean "model.depth"?'),
        (["check", "tiny4", "model.depth=two"], "valid integer"),
        (["check", "nowhere.yaml"], "there is no file nowhere.yaml"),
        (["check", "tiny4", "masking.ratio=0.001"], "change masking.ratio"),
        (["check", "vitl14"], "a batch of 16384 images does not fit the memory of this machine"),
        (["check", "tiny4", "clustering.prototypes=1000000000000"], "does not fit the memory"),
        (["check", "tiny4", *SMALL, "clustering.target_temperature=1e-30", "--rounds", "1"], "the loss is nan"),
        (["check", "tiny4", "--device", "meta"], 'the device "meta" is not there'),
        (["check", "tiny4", "--device", "toaster"], 'the device "toaster" is not there'),
    ],
)
def test__bad_input_gets_one_sentence_and_exit_code_2(arguments: list[str], message: str) -> None:
    result = run(*arguments)
    assert result.returncode == 2
    assert message in result.stderr
    assert result.stderr.strip().startswith("Error: ")
    assert len(result.stderr.strip().splitlines()) == 1
    assert "Traceback" not in result.stderr


def test__a_flag_shows_the_traceback() -> None:
    result = run("--traceback", "recipes", "show", "vitl144")
    assert result.returncode == 2
    assert "Traceback" in result.stderr
    assert 'did you mean "vitl14"?' in result.stderr


@pytest.mark.parametrize(
    "arguments", [["chekc"], ["check", "tiny4", "--rounds", "0"], ["check", "tiny4", "--nonsense"]]
)
def test__misspelt_commands_and_options_exit_with_2(arguments: list[str]) -> None:
    result = run(*arguments)
    assert result.returncode == 2
    assert "Traceback" not in result.stderr


def test__help_and_version() -> None:
    assert run("--version").stdout.strip() == f"capi {capi.__version__}"
    for arguments in (["--help"], ["check", "--help"], ["recipes", "--help"], ["recipes", "show", "--help"]):
        result = run(*arguments)
        assert result.returncode == 0
        assert "Usage" in result.stdout


def test__nothing_is_written(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "capi", "check", "tiny4", *SMALL, "--rounds", "1"],
        cwd=tmp_path,
        capture_output=True,
        check=True,
    )
    assert list(tmp_path.iterdir()) == []
