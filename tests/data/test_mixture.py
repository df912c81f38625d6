from capi.data.sources import EncodedImages, Mixture

A, B = EncodedImages(["x", "y"], [b"1", b"2"]), EncodedImages(["x"], [b"3"])


def test__sources_are_numbered_one_after_the_other_and_names_say_which() -> None:
    mixture = Mixture(["a", "b"], [A, B], None)
    assert len(mixture) == 3
    assert [mixture.name(number) for number in range(3)] == ["a: x", "a: y", "b: x"]
    assert [mixture.read(number) for number in range(3)] == [b"1", b"2", b"3"]


def test__the_fingerprint_follows_contents_order_and_weights() -> None:
    prints = {
        Mixture(["a", "b"], [A, B], None).fingerprint,
        Mixture(["a", "b"], [B, A], None).fingerprint,
        Mixture(["a", "b"], [A, B], [1.0, 2.0]).fingerprint,
        Mixture(["a", "b"], [A, B], [2.0, 2.0]).fingerprint,
    }
    assert len(prints) == 4
    assert Mixture(["c", "d"], [A, B], None).fingerprint in prints
