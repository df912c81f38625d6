from dataclasses import FrozenInstanceError, fields

import pytest
import torch

from capi.evals.datasets import _OPTIONS, DATASETS
from capi.evals.metrics import right_answers
from capi.evals.tasks import NO_ANSWER, AnsweredImages, DataOptions, MaskedImages, MaskSource, SegmentationData
from tests.data.pictures import noise
from tests.evals.toys import Masks, shades, source_of


def test__a_source_of_masks_needs_four_members_and_nothing_else() -> None:
    assert isinstance(Masks([]), MaskSource)
    for missing in ("__len__", "name", "read", "fingerprint"):
        members = {name: getattr(Masks, name) for name in ("__len__", "name", "read", "fingerprint") if name != missing}
        assert not isinstance(type("Less", (), members)(), MaskSource)


def test__no_answer_is_never_right() -> None:
    test = AnsweredImages(shades([0, 1]), torch.tensor([[1, NO_ANSWER], [NO_ANSWER, NO_ANSWER]]))
    scores = torch.eye(2).flip(0)
    assert right_answers(scores, test.answers).tolist() == [True, False]
    mapped = AnsweredImages(test.images, test.answers, torch.tensor([NO_ANSWER, 1]))
    assert right_answers(scores, mapped.answers, mapped.answer_of_class).tolist() == [True, False]
    assert not mapped.restricted


def test__nothing_is_ignored_unless_it_is_said_and_classes_cannot_change() -> None:
    images = MaskedImages(source_of([noise(4, 4, 3)]), Masks([noise(4, 4)]))
    data = SegmentationData({0: "ground"}, frozenset(), images, images)
    assert (data.ignored, data.test_name, data.notes) == (frozenset(), "test", ())
    with pytest.raises(FrozenInstanceError):
        data.classes = {}  # type: ignore[misc]


def test__every_option_is_refused_by_data_sets_that_do_not_heed_it() -> None:
    names = {field.name for field in fields(DataOptions)} - {"verify_counts"}
    assert set(_OPTIONS) == names
    assert all(dataset.reads <= names for dataset in DATASETS.values())


def test__every_data_set_has_a_task_and_says_how_its_files_lie() -> None:
    for name, dataset in DATASETS.items():
        assert dataset.name == name
        assert dataset.classification or dataset.segmentation
        assert dataset.title
        assert dataset.layout
