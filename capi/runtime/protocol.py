"""Settings of the paper's evaluation protocols, stated once for those who run them and for the config.

The k-NN classification at the end is not the paper's, but has defaults all the same.
"""

from typing import Literal

Task = Literal["classification", "segmentation"]
"""What a protocol judges features by."""
VectorKind = Literal["mean_patch", "pooled", "both"]
"""Vectors of an image: the mean of its patches, the encoder's pooled vector, or both in a row."""

PAPER_SIZE = (224, 224)
PAPER_SHARE = 0.1
"""Of the training images, held out to choose a setting by."""

PAPER_RATES = (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2)
"""Peak learning rates of the heads, for a batch of 256."""
PAPER_DECAYS = (5e-4, 1e-3, 5e-2)
"""Their weight decays."""

PAPER_NEIGHBORS = (1, 3, 10, 30)
PAPER_DISTANCES: tuple[Literal["l2", "cosine"], ...] = ("l2", "cosine")
"""Of segmentation by k-NN."""

PAPER_STRENGTHS = tuple(10.0 ** (-6 + 11 * step / 7) for step in range(8))
"""Inverse penalties of segmentation by logistic regression: eight values, log-spaced from 1e-6 to 1e5."""
PAPER_TOLERANCE, PAPER_ITERATIONS = 1e-8, 1000

OUR_NEIGHBORS = (1, 3, 10, 30, 100)
OUR_VOTES: tuple[Literal["majority", "weighted"], ...] = ("majority", "weighted")
OUR_TEMPERATURE = 0.07
