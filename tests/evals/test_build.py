"""Benchmarks as configs ask for them: every option arrives, and a run evaluates its own weights."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from capi.config.benchmarks import PROTOCOL_CONFIGS, BenchmarkConfig
from capi.config.files import load_benchmark, parse_config
from capi.config.schema import Config
from capi.data.reader import ImageReader
from capi.errors import CapiError
from capi.evals import build
from capi.evals.build import build_encoding, build_protocol, count_images, load_data
from capi.evals.features import Encoding
from capi.evals.results import EvaluationProtocol
from capi.evals.tasks import DataOptions
from capi.train.build import build_learner
from capi.train.evaluations import build_evaluations
from capi.train.loop import Evaluation

CPU = torch.device("cpu")
# For each option another value than the default, and where it must arrive as what.
DATA = {
    "train": ("a", "train", "a"),
    "tests": (["b"], "tests", ("b",)),
    "test_share": (0.3, "test_share", 0.3),
    "label": ("c", "label", "c"),
    "exclude": ("d.txt", "exclude", Path("d.txt")),
    "more": ({"e": "f"}, "more", {"e": Path("f")}),
    "verify_counts": (False, "verify_counts", False),
    "ignored": ([4, 2], "ignored", frozenset({2, 4})),
    "class_names": (["g", "h"], "class_names", ("g", "h")),
}
ENCODING = {
    "image_size": ([32, 48], "size", (32, 48)),
    "encode_batch": (5, "batch_size", 5),
    "workers": (2, "workers", 2),
    "precision": ("bfloat16", "precision", torch.bfloat16),
    "memory_gib": (0.5, "memory_bytes", 2**29),
}
PROTOCOL = {
    "validation_share": (0.3, "validation_share", 0.3),
    "seed": (7, "seed", 7),
    "temperature": (0.5, "temperature", 0.5),
    "votes": (["weighted"], "votes", ("weighted",)),
    "neighbors": ([2], "neighbors", (2,)),
    "distances": (["cosine"], "distances", ("cosine",)),
    "ignored_labels_vote": (False, "ignored_labels_vote", False),
    "ties": ("nearest", "ties", "nearest"),
    "standardize": (False, "standardize", False),
    "pictures": (3, "pictures", 3),
    "strengths": ([0.5, 2.0], "strengths", (0.5, 2.0)),
    "tolerance": (1e-3, "tolerance", 1e-3),
    "max_iterations": (9, "max_iterations", 9),
    "schedule": ("small", "schedule", "small"),
    "loss_mean": ("released", "loss_mean", "released"),
    "iterations": (11, "iterations", 11),
    "batch_size": (13, "batch_size", 13),
    "learning_rates": ([0.5, 0.25], "learning_rates", (0.5, 0.25)),
    "weight_decays": ([0.0], "weight_decays", (0.0,)),
    "features": (["mean_patch"], "features", ("mean_patch",)),
}
# Tested below, or read by what writes the results.
ELSEWHERE = {"dataset", "data", "protocol", "limit_train", "limit_tests", "save_probe"}


def data_of(config: BenchmarkConfig, class_folders: Path, mask_folders: Path) -> Any:
    """Real data, whatever the config says of it."""
    if config.task == "classification":
        return build.load_classification("folder", class_folders, DataOptions())
    return build.load_segmentation("masks", mask_folders, DataOptions(ignored=frozenset({255})))


@pytest.mark.parametrize("protocol", PROTOCOL_CONFIGS)
def test__every_option_of_a_config_arrives(
    protocol: str, class_folders: Path, mask_folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = PROTOCOL_CONFIGS[protocol]
    data = data_of(kind(dataset=""), class_folders, mask_folders)
    asked = watch_readers(monkeypatch, data)
    values = DATA | ENCODING | PROTOCOL
    for option in kind.model_fields.keys() - ELSEWHERE:
        config = load_benchmark(f"folder/{protocol}", options={option: values[option][0]})
        encoding = build_encoding(config, (4, 4))
        load_data(config)
        built = build_protocol(config, data, encoding)
        places = ((asked[-1][-1], DATA), (encoding, ENCODING), (built, PROTOCOL))
        arrived = [getattr(place, table[option][1]) == table[option][2] for place, table in places if option in table]
        assert arrived == [True], option


def watch_readers(monkeypatch: pytest.MonkeyPatch, data: Any) -> list[Any]:
    """Have the readers of data sets give this, and list what they were asked for."""
    asked: list[Any] = []

    def replaced(reader: str) -> None:
        def read(name: str, root: Path | None, options: DataOptions) -> Any:
            asked.append((reader, name, root, options))
            return data

        monkeypatch.setattr(build, reader, read)

    replaced("load_classification")
    replaced("load_segmentation")
    return asked


@pytest.mark.parametrize("protocol", PROTOCOL_CONFIGS)
def test__a_protocol_leaves_nothing_to_its_own_defaults(protocol: str, class_folders: Path, mask_folders: Path) -> None:
    """An option of a protocol that no config names could never be changed."""
    config = PROTOCOL_CONFIGS[protocol](dataset="")
    built = build_protocol(config, data_of(config, class_folders, mask_folders), Encoding())
    named = {name for _, name, _ in PROTOCOL.values()} | {"data", "encoding"}
    assert {field.name for field in fields(built)} <= named  # type: ignore[arg-type]
    assert isinstance(built, EvaluationProtocol)


def test__the_data_set_gets_its_place(class_folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = watch_readers(monkeypatch, build.load_classification("folder", class_folders, DataOptions()))
    load_data(load_benchmark("pets/knn", ["data=/there"]))
    load_data(load_benchmark("pets/knn-segmentation"))
    assert [each[:3] for each in asked] == [
        ("load_classification", "pets", Path("/there")),
        ("load_segmentation", "pets", None),
    ]


def test__a_part_of_the_data_follows_from_the_seed(class_folders: Path, mask_folders: Path) -> None:
    classes, masks = (
        [
            load_data(load_benchmark(name, ["limit_train=5", "limit_tests=3", *options, f"seed={seed}"]))
            for seed in (1, 1, 2)
        ]
        for name, options in (
            ("folder/knn", [f"data={class_folders}"]),
            ("masks/knn-segmentation", [f"data={mask_folders}", "ignored=[255]"]),
        )
    )
    for parts in (classes, masks):
        assert [count_images(part) for part in parts] == [8, 8, 8]
        names = [[part.train.images.name(number) for number in range(5)] for part in parts]
        assert names[0] == names[1] != names[2]
        assert parts[0].notes


def test__without_a_size_images_have_the_encoder_s_own() -> None:
    assert build_encoding(load_benchmark("demo/knn"), (32, 48)).size == (32, 48)
    assert build_encoding(load_benchmark("demo/knn", ["image_size=8"]), (32, 48)).size == (8, 8)


def test__images_are_counted_and_identified(class_folders: Path, mask_folders: Path) -> None:
    classes = load_data(load_benchmark("folder/knn", [f"data={class_folders}"]))
    masks = load_data(load_benchmark("masks/knn-segmentation", [f"data={mask_folders}", "ignored=[255]"]))
    assert (count_images(classes), count_images(masks)) == (24, 16)
    identities = build.fingerprints(classes), build.fingerprints(masks)
    assert [list(each) for each in identities] == [["train", "val"], ["train", "val"]]
    # Images and masks both count.
    assert all(len(set(each.split("/"))) == 2 for each in identities[1].values())
    assert len({*identities[0].values(), *identities[1].values()}) == 4


@pytest.fixture
def evaluated(small_config: Config, class_folders: Path) -> Config:
    """A run with an evaluation."""
    return with_evaluations(
        small_config,
        [
            {
                "benchmark": "folder/knn",
                "options": {"data": str(class_folders), "neighbors": [3], "votes": ["majority"]},
                "weights": ["teacher", "student"],
            }
        ],
    )


def with_evaluations(config: Config, evaluations: list[dict[str, Any]]) -> Config:
    return parse_config(config.model_dump(mode="json") | {"evaluations": evaluations})


def test__teacher_and_student_are_scored_and_left_as_they_were(evaluated: Config) -> None:
    (evaluation,) = build_evaluations(evaluated, CPU)
    assert isinstance(evaluation, Evaluation)
    assert evaluation.every_steps == 1000
    learner = build_learner(evaluated)
    with torch.no_grad():
        # The same features for all images: the student is right by chance only.
        learner.student.encoder.patch_embedding.weight.zero_()
    before = [value.clone() for value in (*learner.student.parameters(), *learner.teacher.parameters())]
    assert learner.student.training
    scores = evaluation.run(learner, 0)
    assert set(scores) == {
        f"folder/knn{middle}/{weights}"
        for middle in ("", "/val, mean_patch", "/val, pooled")
        for weights in ("teacher", "student")
    }
    assert scores["folder/knn/teacher"] > scores["folder/knn/val, mean_patch/student"]
    assert learner.student.training
    assert not learner.teacher.average.training
    after = (*learner.student.parameters(), *learner.teacher.parameters())
    assert all(torch.equal(value, earlier) for value, earlier in zip(after, before, strict=True))
    assert all(value.requires_grad for value in learner.student.parameters())


def test__after_an_error_the_student_trains_on(evaluated: Config) -> None:
    (evaluation,) = build_evaluations(evaluated, CPU)
    learner = build_learner(evaluated)
    with torch.no_grad():
        learner.student.encoder.patch_embedding.weight.fill_(torch.nan)
    with pytest.raises(CapiError, match="no finite numbers"):
        evaluation.run(learner, 0)
    assert learner.student.training


@pytest.mark.parametrize(("options", "size"), [({}, (32, 24)), ({"image_size": 16}, (16, 16))], ids=["own", "other"])
def test__images_have_the_size_of_the_run_unless_another_is_named(
    evaluated: Config, options: dict[str, Any], size: tuple[int, int]
) -> None:
    (settings,) = evaluated.model_dump(mode="json")["evaluations"]
    settings["options"] |= options | {"features": ["mean_patch"]}
    (evaluation,) = build_evaluations(with_evaluations(evaluated, [settings]), CPU)
    learner = build_learner(evaluated)
    seen: set[Any] = set()
    learner.student.encoder.register_forward_pre_hook(lambda _, inputs: seen.add(tuple(inputs[0].shape[2:])))
    evaluation.run(learner, 0)
    assert seen == {size}


def test__images_are_normalized_as_in_the_run(evaluated: Config) -> None:
    tree = evaluated.model_dump(mode="json")
    tree["data"] |= {"mean": [0.0, 0.0, 0.0], "std": [1.0, 1.0, 1.0]}
    config = parse_config(tree)
    learner, seen = build_learner(config), []
    learner.student.encoder.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    build_evaluations(config, CPU)[0].run(learner, 0)
    # One image is tried with nothing in it.
    pixels: Tensor = torch.cat([images.flatten() for images in seen if images.any()])
    assert 0 <= pixels.min() < pixels.max() <= 1


def test__images_are_read_once_over_several_evaluations(evaluated: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    crop = ImageReader.crop

    def watched(self: ImageReader, number: int, *arguments: Any) -> Any:
        read.append(number)
        return crop(self, number, *arguments)

    monkeypatch.setattr(ImageReader, "crop", watched)
    (evaluation,) = build_evaluations(evaluated, CPU)
    learner = build_learner(evaluated)
    first = evaluation.run(learner, 0)
    assert len(read) == 18 + 6
    assert evaluation.run(learner, 0) == first
    assert len(read) == 18 + 6


def test__evaluations_of_one_benchmark_are_distinguished(
    evaluated: Config, tmp_path: Path, class_folders: Path
) -> None:
    (settings,) = evaluated.model_dump(mode="json")["evaluations"]
    file = tmp_path / "mine.yaml"
    file.write_text(f"benchmark: folder/knn\ndata: {class_folders}\nneighbors: [1]\n")
    several = [settings, settings, {"benchmark": str(file)}, settings, {"benchmark": str(file)}]
    built = build_evaluations(with_evaluations(evaluated, several), CPU)
    assert [each.name for each in built] == ["folder/knn", "folder/knn-2", "mine", "folder/knn-3", "mine-2"]


@pytest.mark.parametrize("name", ["masks/knn-segmentation", "folder/linear"])
def test__any_protocol_may_be_run_on_the_way(
    small_config: Config, class_folders: Path, mask_folders: Path, name: str
) -> None:
    options = {
        "masks/knn-segmentation": {"data": str(mask_folders), "ignored": [255]},
        "folder/linear": {"data": str(class_folders), "iterations": 3},
    }
    config = with_evaluations(small_config, [{"benchmark": name, "options": options[name]}])
    (evaluation,) = build_evaluations(config, CPU)
    scores = evaluation.run(build_learner(config), 0)
    assert next(iter(scores)) == f"{name}/teacher"
    assert all(0 <= score <= 1 for score in scores.values())


@pytest.mark.parametrize(
    ("evaluation", "message"),
    [
        ({"benchmark": "demo/kn"}, 'did you mean "knn"?'),
        ({"benchmark": "dmo/knn"}, 'did you mean "demo"?'),
        ({"benchmark": "demo/knn", "options": {"neighbor": [1]}}, 'did you mean "neighbors"?'),
        ({"benchmark": "demo/knn-segmentation"}, "no masks"),
        ({"benchmark": "folder/knn", "options": {"data": "/nowhere"}}, "/nowhere"),
        ({"benchmark": "nowhere.yaml"}, "there is no file nowhere.yaml"),
    ],
)
def test__what_cannot_be_evaluated_is_reported_at_once(
    small_config: Config, evaluation: dict[str, Any], message: str
) -> None:
    with pytest.raises(CapiError) as caught:
        build_evaluations(with_evaluations(small_config, [evaluation]), CPU)
    assert message in str(caught.value)
