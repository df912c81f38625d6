"""The paper's settings, as it states them; and that config and protocols take them from one place."""

import dataclasses

import numpy as np
import pytest

from capi.config.benchmarks import PROTOCOL_CONFIGS
from capi.evals.classification import KnnClassification
from capi.evals.probe_protocol import AttentiveClassification, LinearClassification
from capi.evals.probes import PAPER_GRID
from capi.evals.segmentation import KnnSegmentation, LogisticSegmentation
from capi.runtime import protocol

CLASSES = {
    "attentive": AttentiveClassification,
    "knn": KnnClassification,
    "knn-segmentation": KnnSegmentation,
    "linear": LinearClassification,
    "logistic-segmentation": LogisticSegmentation,
}
# What is called otherwise, or is no number of the paper.
OTHERWISE = {"data", "encoding", "settings", "inputs", "pictures"}


def test__the_settings_are_those_of_the_paper() -> None:
    assert protocol.PAPER_SIZE == (224, 224)
    assert protocol.PAPER_SHARE == 0.1
    assert len(protocol.PAPER_RATES) * len(protocol.PAPER_DECAYS) == len(PAPER_GRID) == 30
    np.testing.assert_allclose(protocol.PAPER_STRENGTHS, np.logspace(-6, 5, 8))
    assert (protocol.PAPER_NEIGHBORS, protocol.PAPER_DISTANCES) == ((1, 3, 10, 30), ("l2", "cosine"))


@pytest.mark.parametrize("name", CLASSES)
def test__the_defaults_of_the_config_are_those_of_the_protocol(name: str) -> None:
    config = PROTOCOL_CONFIGS[name](dataset="demo")
    # An attentive probe looks at patches, and nobody is asked.
    otherwise = OTHERWISE | {"features"} if name == "attentive" else OTHERWISE
    fields = {field.name: field.default for field in dataclasses.fields(CLASSES[name]) if field.name not in otherwise}
    assert {"seed", "validation_share"} < fields.keys()
    # Keys of the config are in American English.
    assert {name: getattr(config, name.replace("neighbour", "neighbor")) for name in fields} == fields
