import re

import pytest

from capi.runtime.summary import Summary


class Result(Summary):
    def summary(self) -> tuple[str, dict[str, str]]:
        return "folder/knn: <run>", {"top-1": "71.20 %", "chosen": "a word " * 40}


def test__a_result_fits_the_terminal_and_names_stand_in_a_column(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    lines = repr(Result()).splitlines()
    assert lines[:2] == ["folder/knn: <run>", "  top-1   71.20 %"]
    assert max(map(len, lines)) <= 60
    assert " ".join(" ".join(lines).split()).count("a word") == 40


def test__a_notebook_gets_a_list_without_markup_of_others_or_style() -> None:
    html = Result()._repr_html_()
    assert "&lt;run&gt;" in html
    assert re.findall("<li><b>(.*?)</b>", html) == ["top-1", "chosen"]
    assert "style" not in html
