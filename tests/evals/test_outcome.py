from dataclasses import dataclass, field

import pytest
import torch

from capi.evals.fitted_probes import LinearClassifier, Probe
from capi.evals.results import Outcome, departures, precision_notes, size_notes

PAPER = {"share": 0.1, "standardize": True, "neighbors": (1, 3, 10), "names": ("l2", "cosine")}


@dataclass(frozen=True)
class Protocol:
    share: float = 0.1
    standardize: bool = True
    neighbors: tuple[int, ...] = (1, 3, 10)
    names: tuple[str, ...] = ("l2", "cosine")
    more: dict[str, int] = field(default_factory=dict)


def test__the_papers_own_settings_are_no_departure() -> None:
    assert departures(Protocol(), PAPER) == []
    assert departures(Protocol(more={"beside": 1}), PAPER) == []


@pytest.mark.parametrize(
    ("protocol", "sentence"),
    [
        (Protocol(share=0.25), "share: 0.25 instead of 0.1"),
        (Protocol(standardize=False), "standardize: False instead of True"),
        (Protocol(neighbors=(5,)), "neighbors: 5 instead of 1, 3, 10"),
        (Protocol(names=("cosine",)), "names: cosine instead of l2, cosine"),
    ],
)
def test__each_departure_is_a_sentence_with_both_values(protocol: Protocol, sentence: str) -> None:
    assert departures(protocol, PAPER) == [sentence]


def test__names_are_written_in_words() -> None:
    @dataclass(frozen=True)
    class Other:
        ignored_labels_vote: bool = False

    assert departures(Other(), {"ignored_labels_vote": True}) == ["ignored labels vote: False instead of True"]


@pytest.mark.parametrize(
    ("asked", "used", "patch_size", "notes"),
    [
        ((224, 224), (224, 224), 14, []),
        ((448, 224), (448, 224), 14, ["image size: 448 x 224 px instead of 224 x 224 px"]),
        ((224, 224), (220, 220), 20, ["image size: 220 x 220 px, the nearest to 224 x 224 px that patches of 20 fill"]),
        (
            (100, 100),
            (96, 96),
            16,
            [
                "image size: 100 x 100 px instead of 224 x 224 px",
                "image size: 96 x 96 px, the nearest to 100 x 100 px that patches of 16 fill",
            ],
        ),
    ],
)
def test__another_resolution_and_its_rounding_are_said(
    asked: tuple[int, int], used: tuple[int, int], patch_size: int, notes: list[str]
) -> None:
    assert size_notes(asked, used, patch_size, (224, 224)) == notes


def test__the_first_score_is_the_one_to_quote() -> None:
    model = LinearClassifier(torch.zeros(2, 3), torch.zeros(2), "mean_patch")
    probe = Probe("linear", model, {0: "a", 1: "b"}, (8, 8), {"width": 3})
    outcome = Outcome({"test": 0.5, "other": 0.9}, {}, [], [], [], {}, probe)
    assert outcome.main == 0.5


def test__another_precision_is_a_departure() -> None:
    assert precision_notes(torch.float32) == []
    assert precision_notes(torch.bfloat16) == ["precision: bfloat16 instead of float32"]
