"""What stands on the screen at the end of an evaluation."""

import io

import pytest

from capi.cli.evaluation import print_record
from capi.cli.terminal import Terminal, print_scores


def test__a_record_is_reported_as_it_is_even_where_it_looks_like_markup(capsys: pytest.CaptureFixture[str]) -> None:
    print_record(
        {
            "benchmark": "imagenet/knn",
            "model": "runs/[red]first",
            "scores": {"val [bold]": 0.1234},
            "chosen": {"k": 10, "temperature": 0.070000001, "validation": 0.5},
            "image_size": [32, 48],
            "details": {"test images": {"val [bold]": 500}},
            "seconds": 12.4,
            "device": "cpu",
            "deviations": ["image_size is 8 [px]", "k is 10"],
            "warnings": ["few images"],
        }
    )
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "imagenet/knn: runs/[red]first"
    assert lines[2].split() == ["val", "[bold]", "12.34", "%"]
    assert lines[3:] == [
        "chosen: k 10, temperature 0.07; 500 val [bold] images of 32 x 48 px, 12 s on cpu",
        "departs from the paper: image_size is 8 [px]; k is 10",
        "warning: few images",
    ]


@pytest.mark.parametrize("width", [60, 80, 200])
def test__a_table_that_is_too_wide_is_printed_in_parts_and_no_number_is_cut(width: int) -> None:
    columns = [f"Benchmark{number} k-NN" for number in range(9)]
    models = ["runs/a-very-long-name-of-a-folder", "untrained:vitl14", "pixels:16"]
    rows = [
        ((model, "224 px"), [f"{10 * row + number}.25 (81.4)" for number in range(9)])
        for row, model in enumerate(models)
    ]
    stream = io.StringIO()
    print_scores(Terminal(file=stream, width=width), ("model", "image size"), columns, rows)
    shown = stream.getvalue()
    assert max(map(len, shown.splitlines())) <= width
    assert "\N{HORIZONTAL ELLIPSIS}" not in shown
    for _, numbers in rows:
        assert all(number in shown for number in numbers)
    assert all(name.split()[0] in shown for name in columns)
    # Each part names its rows again.
    heads = sum(line.startswith("model") for line in shown.splitlines())
    assert shown.count("pixels:16") == heads
    assert (heads == 1) == (width == 200)


@pytest.mark.parametrize(
    ("columns", "whole"), [(["folder/knn"], True), ([f"imagenette{n}/knn" for n in range(5)], False)]
)
def test__a_benchmarks_name_is_broken_only_where_it_must_be(columns: list[str], whole: bool) -> None:
    stream = io.StringIO()
    print_scores(Terminal(file=stream, width=80), ("model",), columns, [(("pixels:16",), ["10.25"] * len(columns))])
    assert all((name in stream.getvalue()) == whole for name in columns)
    assert "/ knn" not in stream.getvalue()
