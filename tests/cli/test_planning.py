"""Plans as a user meets them."""

import json
import shlex
from pathlib import Path

import pytest

from capi.config.files import load_config
from capi.train.cost.hardware import gpus
from tests.cli.conftest import RunHere, assert_refused


@pytest.fixture(autouse=True)
def _a_wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the tables say is one thing, how they are folded is another."""
    monkeypatch.setenv("COLUMNS", "200")


def test__a_plan_says_what_is_assumed_and_how_far_the_paper_is(run_here: RunHere) -> None:
    ran = run_here("plan", "vitl14", "--gpus", "32", "--gpu", "a100-80g")
    assert ran.code == 0
    for part in (
        "vitl14 on 32 x NVIDIA A100 SXM4 80 GB: a plan, nothing was run",
        "assumed: 45% of the peak, --mfu",
        "--pue 1.1, --carbon-intensity 0.48 kg/kWh",
        "512 for a GPU",
        "activations of the encoder",
        "replicated on every GPU",
        "plain clustering, b x n x k at once",
        "5,763",
        "2,651",
    ):
        assert part in ran.stdout, part


def test__json_has_the_same_numbers(run_here: RunHere) -> None:
    ran = run_here("plan", "vits16", "--gpu", "rtx4090", "--mfu", "0.5", "optimization.steps=10", "--json")
    plan = json.loads(ran.stdout)
    flop = sum(plan["flop_an_image"].values())
    assert plan["effort"]["seconds_a_step"] == pytest.approx(flop * 512 / (165.2e12 * 0.5))
    assert plan["effort"]["hours"] == pytest.approx(10 * plan["effort"]["seconds_a_step"] / 3600)
    held = sum(part["bytes"] for part in plan["memory"]["parts"] if part["phase"] in ("always", "student"))
    assert held == plan["memory"]["phases"]["student"] == plan["memory"]["peak"]
    assert plan["fits"]
    assert "paper" not in plan


def test__a_batch_that_does_not_fit_gets_advice_how_to_reach_it(run_here: RunHere) -> None:
    few = run_here("plan", "vitl14", "--gpus", "8", "--gpu", "h100")
    assert "optimization.micro_batches=4 reaches the batch" in few.stdout
    alone = run_here("plan", "vitl14", "--gpu", "rtx4090")
    assert "not even the most micro-batches reach 16384" in " ".join(alone.stdout.split())


def test__steps_on_this_machine_are_compared(run_here: RunHere, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("capi.train.cost.hardware.measured_peak", lambda *_: 1e11)
    small = ["model.width=32", "model.depth=1", "clustering.prototypes=16"]
    ran = run_here("plan", "demo", *small, "--measure", "--images", "4", "--json")
    assert ran.code == 0, ran.stderr
    plan = json.loads(ran.stdout)
    assert plan["batch_size"] == 4
    names = [row["name"] for row in plan["measured"]["comparisons"]]
    assert names[0] == "seconds a step"
    assert all(row["measured"] > 0 for row in plan["measured"]["comparisons"])
    assert plan["gpu"]["measured"]


def test__a_suggestion_ends_with_a_command_that_loads(run_here: RunHere, class_folders: Path) -> None:
    ran = run_here("plan", "--suggest", class_folders, "--gpu", "l4")
    assert ran.code == 0, ran.stderr
    words = shlex.split(ran.stdout.splitlines()[-1])
    assert words[:3] == ["capi", "pretrain", "tiny4"]
    load_config(words[2], [word for word in words[3:] if "=" in word])
    assert "rule of thumb" in ran.stdout
    suggestion = json.loads(run_here("plan", "--suggest", class_folders, "--gpu", "l4", "--json").stdout)
    assert shlex.split(suggestion["command"]) == words
    assert suggestion["images"]["count"] == 24


@pytest.mark.parametrize("command", [("plan", "vitl14", "--gpu", "h200"), ("plan", "--gpu", "list"), ("recipes",)])
def test__tables_in_a_pipe_are_as_wide_as_columns_says_and_80_without(
    run_here: RunHere, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    for columns in (None, 60, 80, 120):
        monkeypatch.setenv("COLUMNS", str(columns)) if columns else monkeypatch.delenv("COLUMNS")
        lines = run_here(*command).stdout.splitlines()
        assert max(map(len, lines)) <= (columns or 80)
        assert "\N{HORIZONTAL ELLIPSIS}" not in "".join(lines)


def test__gpus_are_listed(run_here: RunHere) -> None:
    ran = run_here("plan", "--gpu", "list")
    assert [line.split()[0] for line in ran.stdout.splitlines()[1:]] == list(gpus())
    assert set(json.loads(run_here("plan", "--gpu", "list", "--json").stdout)) == set(gpus())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan"], "a recipe, or --suggest with images"),
        (["plan", "demo", "--suggest", "x"], "one of both"),
        (["plan", "demo", "--gpu", "h10"], 'no GPU "h10"; did you mean "h100'),
        (["plan", "demo", "--gpu", "t4", "--gpus", "3"], "cannot be divided among 3 GPUs"),
        (["plan", "demo", "--gpu", "t4", "--measure"], "leave out --gpu and --gpus"),
        (["plan", "demo", "--gpus", "2", "--measure"], "leave out --gpu and --gpus"),
        (["plan", "demo", "--images", "2"], "add --measure"),
        (["plan", "--suggest", "photos", "--measure"], "--measure and --suggest exclude each other"),
        (["plan", "demo", "--gpu", "t4", "run.precision=bfloat16"], "has no bfloat16"),
        (["plan", "distill", "--gpu", "t4"], "capi pretrain --check"),
        (["plan", "dmeo", "--gpu", "t4"], 'did you mean "demo"'),
        (["plan", "--suggest", "/nowhere", "--gpu", "t4"], "/nowhere"),
    ],
)
def test__wrong_questions_are_refused_in_a_sentence(run_here: RunHere, arguments: list[str], message: str) -> None:
    assert_refused(run_here(*arguments), message)
