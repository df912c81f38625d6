from capi.evals.wording import some_of


def test__long_lists_are_shortened_and_the_rest_is_counted() -> None:
    names = [str(number) for number in range(10)]
    assert some_of(names) == "0, 1, 2, 3, 4 and 5 more"
    assert some_of(names[:6]) == "0, 1, 2, 3, 4 and 1 more"
    assert some_of(names[:5]) == "0, 1, 2, 3, 4"
    assert some_of(["a"]) == "a"
