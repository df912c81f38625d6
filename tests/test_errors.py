import pytest

from capi.errors import CapiError, counted, expect, nearest, quoted, some_of


def test__of_equally_close_names_the_one_with_swapped_letters_is_meant() -> None:
    assert (
        nearest("vitl41", ["vitl14", "vitl16"]) == nearest("vitl41", ["vitl16", "vitl14"]) == '; did you mean "vitl14"?'
    )


def test__nearest_names_the_closest_or_nothing() -> None:
    assert nearest("dept", ["depth", "width"]) == '; did you mean "depth"?'
    assert nearest("qqq", ["depth", "width"]) == ""


def test__bad_input_is_a_value_error() -> None:
    assert issubclass(CapiError, ValueError)


def test__a_value_of_another_type_is_reported_with_what_was_expected() -> None:
    expect("size", 3, (int, str), "a side")
    with pytest.raises(CapiError, match=r"^size must be a side, not None of type NoneType$"):
        expect("size", None, (int, str), "a side")
    # What may be long is not shown.
    with pytest.raises(CapiError, match=r"^size must be a side, not of type list$"):
        expect("size", [1] * 1000, int, "a side")


def test__long_lists_are_shortened_and_the_rest_is_counted() -> None:
    names = [str(number) for number in range(10)]
    assert some_of(names, 5) == "0, 1, 2, 3, 4 and 5 more"
    assert some_of(names[:4]) == "0, 1, 2 and 1 more"
    assert some_of(names[:3]) == "0, 1, 2"
    assert some_of(quoted(["a"])) == '"a"'


def test__what_is_counted_is_singular_where_there_is_one() -> None:
    assert [counted(number, "image") for number in (0, 1, 2000)] == ["0 images", "1 image", "2,000 images"]
    assert counted(1, "micro-batch") == "1 micro-batch"
    assert [counted(2, what) for what in ("micro-batch", "class", "process")] == [
        "2 micro-batches",
        "2 classes",
        "2 processes",
    ]


def test__options_are_named_as_the_caller_gives_them(monkeypatch: pytest.MonkeyPatch) -> None:
    error = CapiError("x holds a run: --resume goes on, --data-root or --keep-order, see `capi models --all`")
    assert str(error) == "x holds a run: `resume=True` goes on, `data_root` or `shuffle=None`, see `capi models --all`"
    monkeypatch.setattr(CapiError, "in_command", True)
    assert "--resume goes on, --data-root" in str(error)
