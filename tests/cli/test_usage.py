"""Wrong words, as a user meets them: one sentence, the nearest neighbour of a misspelt one, exit code 2."""

import pytest

from tests.cli.conftest import RunHere, assert_refused


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["reprot"], 'there is no command "capi reprot"; did you mean "report"? (capi --help lists all)'),
        (["data", "chek"], 'there is no command "capi data chek"; did you mean "check"?'),
        (["pretrain", "tiny4", "--chek"], 'capi pretrain has no option "--chek"; did you mean "--check"?'),
        (["ablate", "--no-photo"], 'capi ablate has no option "--no-photo"; did you mean "--no-photos"?'),
        (["--tracebak", "recipes"], 'capi has no option "--tracebak"; did you mean "--traceback"?'),
        (
            ["pretrain", "tiny4", "--check", "--qqqq"],
            'capi pretrain has no option "--qqqq" (capi pretrain --help lists',
        ),
        (["pretrain", "tiny4", "--check", "--rounds", "0"], '--rounds cannot be "0": it should be from 1 to 1000000'),
        (["shards", "photos", "--out", "x", "--workers", "-1"], '--workers cannot be "-1": it should be from 1 to'),
        (["extract", "pixels:4", "demo", "--out", "x", "--batch-size", "0"], '--batch-size cannot be "0": it'),
        (["nearest", "features", "image", "--count", "none"], '--count cannot be "none": it should be a valid integer'),
        (["plan", "demo", "--mfu", "3"], '--mfu cannot be "3.0": it should be from 0.001 to 1'),
        (["evaluate", "x", "--protocol", "foo"], "are one word, DATASET/PROTOCOL, after the model, such as folder/knn"),
        (["compare", "x", "--dataset=pets"], "are one word, DATASET/PROTOCOL, after --on"),
        (["pretrain", "smal"], 'there is no recipe "smal"; did you mean "small"?'),
        (["pretrain", "small", "optimization.stepz=3"], 'there is no key "optimization.stepz"'),
        (["pretrain", "tiny4", "--steps", "3"], "are given without dashes, optimization.steps=3"),
        (["pretrain", "tiny4", "--epochs=10"], "of a recipe are given without dashes, optimization.epochs=10"),
        (["pretrain", "tiny4", "--batch-size", "64"], "optimization.batch_size=64"),
        (["demo", "--lr", "1e-4"], "optimization.learning_rate=1e-4"),
        (["ablate", "predictor", "--job", "3"], 'no option "--job"; did you mean "--jobs"?'),
        (["evaluate", "x", "csv/knn", "--label", "breed"], "of a benchmark are given without dashes, label=breed"),
        (["plan", "demo", "--gpus"], "--gpus needs a value after it"),
        (["evaluate", "pixels:4"], "capi evaluate needs BENCHMARK (DATASET/PROTOCOL, such as demo/knn"),
        (["predict", "pixels:4", "probe.safetensors", "--out", "x"], "capi predict needs IMAGES (Images, or folders"),
        (["predict", "pixels:4", "probe.safetensors", "images"], "capi predict needs --out (Folder for labels.csv"),
        (["launch", "slurm", "demo", "--out", "x"], "capi launch slurm needs --data (What `capi pretrain --data`"),
        (["compare", "pixels:4", "--on", "--out", "x"], "compare takes MODEL... --on BENCHMARK... --out FOLDER"),
        (["compare", "--on", "demo/knn", "--out", "x"], "compare takes MODEL... --on BENCHMARK... --out FOLDER"),
        (["models", "more"], "got unexpected extra argument(s) (more) (capi models --help tells what there is)"),
    ],
    ids=lambda each: " ".join(each) if isinstance(each, list) else "",
)
def test__wrong_words_get_one_sentence_and_exit_code_2(run_here: RunHere, arguments: list[str], sentence: str) -> None:
    assert_refused(run_here(*arguments), sentence)


RUN = ["pretrain", "tiny4", "--data", "x", "--out", "y"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["pretrain", "tiny4", "--check", "--resume"], "--resume is of no use to --check, which writes nothing"),
        (["pretrain", "tiny4", "--check", "--overwrite"], "--overwrite is of no use to --check"),
        (["pretrain", "tiny4", "--check", "--data", "x", "--out", "y"], "--out is of no use to --check"),
        ([*RUN, "--rounds", "3"], "--rounds is the number of iterations that --check times: add --check, or leave it"),
        (["demo", "--resume", "--overwrite"], "--resume and --overwrite exclude each other"),
        (["plan", "demo", "--hours", "24"], "--hours is the time that --suggest may fill: add --suggest, or leave it"),
        (["plan", "demo", "--measure", "--pue", "2"], "--pue is an assumption about energy, of which --measure says"),
        (["plan", "--suggest", "x", "--carbon-intensity", "1"], "--carbon-intensity is an assumption about energy"),
        (["plan", "demo", "--gpu", "list"], "RECIPE is of no use to --gpu list"),
        (["plan", "--gpu", "list", "--gpus", "1"], "--gpus is of no use to --gpu list"),
        (["shards", "x", "--out", "y", "--keep-order", "--shuffle", "0"], "--shuffle is the seed of a shuffle"),
        (["ablate", "--list", "--seeds", "3"], "--seeds is of no use to --list, which runs nothing"),
        (["ablate", "predictor", "--list"], "TABLE is of no use to --list"),
        (["evaluate", "pixels:4", "demo/knn", "--overwrite"], "--overwrite replaces what is in --out: name the folder"),
        (
            ["compare", "pixels:4", "--on", "demo/knn", "--out", "x", "--no-paper"],
            "--paper/--no-paper belongs to --table",
        ),
        (
            ["extract", "pixels:4", "demo", "--out", "x", "--label", "breed"],
            "--label is the column of a CSV, which demo",
        ),
    ],
    ids=lambda each: " ".join(each) if isinstance(each, list) else "",
)
def test__an_option_without_effect_is_refused(run_here: RunHere, arguments: list[str], sentence: str) -> None:
    assert_refused(run_here(*arguments), sentence)


@pytest.mark.parametrize(
    "arguments",
    [
        ["evaluate", "pixels:4", "demo/knn"],
        ["predict", "pixels:4", "probe.safetensors", "photos", "--out", "x"],
        ["compare", "pixels:4", "untrained:tiny4", "--on", "demo/knn", "--out", "x"],
        ["compare", "--table", "main", "--out", "x"],
        ["extract", "pixels:4", "demo", "--out", "x.safetensors"],
        ["visualize", "pixels:4", "--out", "x"],
        ["explore", "pixels:4"],
        ["export", "capi_vitl14_lvd", "--out", "x"],
    ],
    ids=lambda words: words[0],
)
def test__a_student_is_asked_of_runs_alone(run_here: RunHere, arguments: list[str]) -> None:
    assert_refused(run_here(*arguments, "--weights", "student"), "--weights student is a choice of runs")
