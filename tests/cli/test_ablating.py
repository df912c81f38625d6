import json
from pathlib import Path

from tests.api.studies import QUICK, SMALL, labeled_photos
from tests.cli.conftest import RunHere


def test__a_table_is_run_and_its_page_named(run_here: RunHere, tmp_path: Path) -> None:
    data = labeled_photos(tmp_path / "data")
    options = [word for option in QUICK for word in ("--option", option)]
    ran = run_here(
        *("ablate", "sinkhorn", *SMALL, "--data", data, "--out", tmp_path / "out", "--scale", "smoke"),
        *("--device", "cpu", *options),
    )
    assert ran.code == 0, ran.stderr
    lines = ran.stdout.splitlines()
    assert lines[-1] == f"wrote {tmp_path / 'out' / 'sinkhorn.html'}: open it in a browser"
    assert "No ordering of the paper is judged: runs at smoke scale are too short" in " ".join(lines)
    assert all(len(line) <= 80 for line in lines[:-1])
    plain = json.loads((tmp_path / "out" / "sinkhorn.json").read_text())
    for row in plain["rows"]:
        printed = " ".join(line for line in lines if line.startswith(row["name"].split()[0])).split()
        assert {f"{100 * each['mean']:.1f}" for each in row["scores"].values()} <= set(printed)
    assert "4 of 4: default-seed0 is done" in ran.stderr


def test__the_tables_are_named_with_their_rows(run_here: RunHere) -> None:
    ran = run_here("ablate", "--list")
    assert ran.code == 0
    assert "sinkhorn" in ran.stdout
    assert "[0.2, 1.0]" in ran.stdout


def test__bad_input_ends_with_2_and_a_sentence(run_here: RunHere, tmp_path: Path) -> None:
    missing = run_here("ablate", "sinkhorn")
    assert (missing.code, missing.stdout) == (2, "")
    assert "ablate needs a table, --data with images and labels, and --out" in missing.stderr
    for misspelt in ("masking.kind=blok", "optimization.optimizer=admw", "model.predictor.kind=crss"):
        wrong = run_here(
            "ablate", "sinkhorn", misspelt, "--data", "demo", "--out", tmp_path / "out", "--scale", "smoke"
        )
        assert (wrong.code, wrong.stdout) == (2, "")
        assert "did you mean" in wrong.stderr
        # Before anything is run or written.
        assert not (tmp_path / "out").exists()
    unknown = run_here("ablate", "sinkhron", "--data", "demo", "--out", tmp_path / "out")
    assert unknown.code == 2
    assert 'did you mean "sinkhorn"' in unknown.stderr
