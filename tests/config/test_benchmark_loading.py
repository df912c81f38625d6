from pathlib import Path

import pytest

from capi.config.benchmarks import PROTOCOL_CONFIGS, KnnConfig, KnnSegmentationConfig, LinearConfig
from capi.config.files import EXAMPLE, load_benchmark, split_name
from capi.errors import CapiError


@pytest.mark.parametrize("protocol", PROTOCOL_CONFIGS)
def test__a_name_is_a_data_set_and_a_protocol(protocol: str) -> None:
    config = load_benchmark(f"pets/{protocol}")
    assert config == PROTOCOL_CONFIGS[protocol](dataset="pets")
    assert split_name(f"pets/{protocol}", "") == ("pets", protocol)


def test__overrides_are_yaml_and_come_after_options() -> None:
    config = load_benchmark(
        "folder/knn",
        ["neighbors=[1, 5]", "temperature=1e-2", "image_size=[32, 48]", "more.other=/there"],
        options={"neighbors": [7], "seed": 3, "more": {"one": "/here"}},
    )
    assert isinstance(config, KnnConfig)
    assert (config.neighbors, config.temperature, config.seed) == ((1, 5), 0.01, 3)
    assert config.height_and_width == (32, 48)
    assert config.more == {"one": "/here", "other": "/there"}


def test__a_file_holds_the_name_and_options(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("benchmark: masks/knn-segmentation\ndata: /photos\nignored: [255]\npictures: 2\n")
    expected = KnnSegmentationConfig(dataset="masks", data="/photos", ignored=(255,), pictures=2, seed=4)
    assert load_benchmark(path, ["seed=4"]) == load_benchmark(str(path), options={"seed": 4}) == expected


def test__what_was_written_to_the_results_can_be_read_back() -> None:
    config = load_benchmark("demo/linear", ["iterations=5", "tests=[val]"])
    assert LinearConfig.model_validate_json(config.model_dump_json()) == config


@pytest.mark.parametrize(
    ("name", "overrides", "message"),
    [
        ("demo", [], "expected DATASET/PROTOCOL, such as demo/knn"),
        ("", [], "expected DATASET/PROTOCOL"),
        ("demo/", [], "expected DATASET/PROTOCOL"),
        ("/knn", [], "expected DATASET/PROTOCOL"),
        ("a/b/knn", [], "expected DATASET/PROTOCOL"),
        ("demo/kn", [], 'no protocol "kn"; did you mean "knn"? (there are knn, attentive,'),
        ("demo/knn", ["neighbor=[3]"], 'no key "neighbor"; did you mean "neighbors"?'),
        ("demo/knn", ["standardize=false"], "an option of knn-segmentation and logistic-segmentation, not of knn"),
        ("demo/knn", ["iterations=5"], "demo/knn: iterations is an option of attentive and linear, not of knn"),
        ("demo/linear", ["neighbors=[1]"], "neighbors is an option of knn and knn-segmentation, not of linear"),
        ("demo/knn", ["neighbors=3"], "neighbors = 3 does not fit: expected a list, so write [3]"),
        ("demo/knn", ["votes=weighted"], 'votes = "weighted" does not fit: expected a list, so write ["weighted"]'),
        ("demo/knn", ["neighbors=[]"], "neighbors = [] does not fit: expected a list of at least 1"),
        ("demo/knn", ["neighbors=[0]"], "greater than or equal to 1"),
        ("demo/knn", ["votes=[all]"], "'majority' or 'weighted'"),
        ("demo/knn", ["validation_share=1"], "less than 1"),
        ("demo/knn", ["temperature=0"], "greater than 0"),
        ("demo/knn", ["image_size=0"], "image_size = 0 does not fit"),
        ("demo/knn", ["image_size=[32]"], "valid integer, or input should be a list of at least 2"),
        ("demo/knn", ["image_size=big"], 'image_size = "big" does not fit: input should be a valid integer, or input'),
        ("demo/knn", ["verify_counts=maybe"], "valid boolean"),
        ("demo/knn", ["precision=float16"], "'float32' or 'bfloat16'"),
        ("demo/knn", ["more=3"], "more = 3 does not fit"),
        ("demo/knn", ["seed=-1"], "greater than or equal to 0"),
        ("demo/knn", ["data=[a]"], "valid string"),
        ("demo/knn", ["nonsense"], "expected key=value, such as image_size=448"),
        ("demo/knn", ["data=["], "not valid YAML"),
        ("demo/knn", ["dataset=pets"], "the benchmark's name says it"),
        ("demo/knn", ["protocol=linear"], "the benchmark's name says it"),
        ("demo/knn-segmentation", ["tests=[val, test]"], "segmentation reports one split"),
        ("demo/logistic-segmentation", ["strengths=[-1]"], "greater than 0"),
        ("nowhere.yaml", [], "there is no file nowhere.yaml: give DATASET/PROTOCOL"),
    ],
)
def test__what_does_not_fit_is_reported_in_one_sentence(name: str, overrides: list[str], message: str) -> None:
    with pytest.raises(CapiError) as caught:
        load_benchmark(name, overrides)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test__an_entry_that_does_not_fit_is_the_only_complaint() -> None:
    with pytest.raises(CapiError, match=r"neighbors = 0 does not fit: input should be greater than or equal to 1$"):
        load_benchmark("demo/knn", ["neighbors=[0]"])


def test__the_example_of_an_override_is_an_option_of_every_benchmark() -> None:
    for protocol in PROTOCOL_CONFIGS:
        assert load_benchmark(f"demo/{protocol}", [EXAMPLE]) != load_benchmark(f"demo/{protocol}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "must hold a line `benchmark: DATASET/PROTOCOL`"),
        ("- a\n", "must hold a line `benchmark: DATASET/PROTOCOL`"),
        ("data: /photos\n", "must hold a line `benchmark: DATASET/PROTOCOL`"),
        ("benchmark: 3\n", '"3" is no benchmark'),
        ("benchmark: demo/knn\nseeds: 3\n", 'did you mean "seed"?'),
        ("benchmark: demo/knn\ndataset: pets\n", "the benchmark's name says it"),
        ("benchmark: demo/knn\nseed: 1\nseed: 2\n", 'the key "seed" stands twice'),
        ("benchmark: [", "not valid YAML"),
        (b"\xff\xfe\x00", "not a text in UTF-8"),
    ],
)
def test__broken_files_say_what_is_wrong(tmp_path: Path, text: str | bytes, message: str) -> None:
    path = tmp_path / "broken.yaml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(CapiError) as caught:
        load_benchmark(path)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)
