import torch

from capi.evals.limits import limited
from capi.evals.tasks import AnsweredImages, ClassificationData, LabeledImages, MaskedImages, SegmentationData
from tests.data.pictures import noise
from tests.evals.toys import Masks, source_of


def images(count: int) -> object:
    return source_of([noise(4, 4, 3, seed=seed) for seed in range(count)])


def classification(train: int = 20, test: int = 10) -> ClassificationData:
    answers = torch.arange(test)[:, None]
    labels = LabeledImages(images(train), torch.arange(train))
    return ClassificationData(tuple(map(str, range(20))), labels, {"test": AnsweredImages(images(test), answers)})


def test__a_part_keeps_images_and_labels_together_and_says_so() -> None:
    whole = classification()
    part = limited(whole, train=7, tests=3, seed=0)
    assert (len(part.train.images), len(part.tests["test"].images)) == (7, 3)
    for number, label in enumerate(part.train.labels.tolist()):
        assert part.train.images.name(number) == whole.train.images.name(label)
        assert part.train.images.read(number) == whole.train.images.read(label)
    for number, (answer,) in enumerate(part.tests["test"].answers.tolist()):
        assert part.tests["test"].images.name(number) == whole.tests["test"].images.name(answer)
    assert part.notes == ("a random 7 of 20 training images", "a random 3 of 10 test images")


def test__the_part_follows_from_the_seed_and_its_fingerprint_tells_parts_apart() -> None:
    parts = [limited(classification(), train=7, tests=None, seed=seed).train for seed in (0, 0, 1)]
    assert parts[0].labels.tolist() == parts[1].labels.tolist() != parts[2].labels.tolist()
    assert parts[0].images.fingerprint == parts[1].images.fingerprint != parts[2].images.fingerprint


def test__enough_is_everything() -> None:
    whole = classification()
    same = limited(whole, train=20, tests=None, seed=0)
    assert same.train is whole.train
    assert same.notes == ()


def test__masks_stay_with_their_images() -> None:
    masks = [torch.full((4, 4), number).numpy() for number in range(9)]
    both = MaskedImages(images(9), Masks(masks))
    whole = SegmentationData({number: str(number) for number in range(9)}, frozenset(), both, both)
    part = limited(whole, train=4, tests=2, seed=3)
    for which, count in ((part.train, 4), (part.test, 2)):
        assert len(which.images) == len(which.masks) == count
        for number in range(count):
            label = int(which.masks.read(number)[0, 0])
            assert which.images.name(number) == both.images.name(label)
            assert which.masks.name(number) == both.masks.name(label)
