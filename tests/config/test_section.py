import pytest
from pydantic import ValidationError

from capi.config.schema import Count, NotNegative, OpenFraction, Positive, Section


class Example(Section):
    count: Count = 1
    share: OpenFraction = 0.5
    positive: Positive = 1.0
    not_negative: NotNegative = 0.0
    """What it is for."""


@pytest.mark.parametrize(
    "values",
    [
        *({"count": 0}, {"count": 1.5}, {"count": "1"}, {"share": 0.0}, {"share": 1.0}, {"positive": 0.0}),
        *({"positive": float("inf")}, {"not_negative": -1.0}, {"not_negative": float("nan")}, {"other": 1}),
    ],
)
def test__values_out_of_range_of_another_type_or_unknown_are_refused(values: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        Example(**values)


def test__a_section_is_frozen_and_documented_below_its_keys() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        Example().count = 2
    assert Example.model_fields["not_negative"].description == "What it is for."
