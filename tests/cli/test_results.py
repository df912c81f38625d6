"""What stands on the screen at the end of an evaluation."""

import pytest

from capi.cli.evaluation import print_record


def test__a_record_is_told_as_it_is_even_where_it_looks_like_markup(capsys: pytest.CaptureFixture[str]) -> None:
    print_record(
        {
            "benchmark": "folder/knn",
            "model": "runs/[red]first",
            "scores": {"val [bold]": 0.1234},
            "chosen": {"k": 10, "temperature": 0.070000001, "validation": 0.5},
            "image_size": [32, 48],
            "seconds": 12.4,
            "device": "cpu",
            "deviations": ["image_size is 8 [px]"],
            "warnings": ["few images"],
        }
    )
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "folder/knn: runs/[red]first"
    assert lines[2].split() == ["val", "[bold]", "12.34", "%"]
    assert lines[3:] == [
        "chosen: k 10, temperature 0.07; images of 32 x 48 px, 12 s on cpu",
        "departs from the paper: image_size is 8 [px]",
        "warning: few images",
    ]
