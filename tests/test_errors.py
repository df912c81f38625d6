from capi.errors import CapiError, nearest


def test__nearest_names_the_closest_or_nothing() -> None:
    assert nearest("dept", ["depth", "width"]) == '; did you mean "depth"?'
    assert nearest("qqq", ["depth", "width"]) == ""


def test__bad_input_is_a_value_error() -> None:
    assert issubclass(CapiError, ValueError)
