"""Checkpoints are read strictly and never trusted."""

import os
import pickle
from pathlib import Path

import pytest
import torch

from capi.errors import CapiError
from capi.train.checkpoint import Checkpoints, Position, tensors
from capi.train.checkpoint_reading import SafeReader, read_tensors
from capi.train.step import Learner


def test__a_checkpoint_of_another_model_is_refused(learner: Learner, checkpoints: Checkpoints) -> None:
    checkpoints.save(learner, Position(step=1))
    path = checkpoints.path(1)
    with pytest.raises(CapiError, match=r'lacks "student\.nonsense"'):
        read_tensors(path, {"student.nonsense": torch.zeros(2)})
    with pytest.raises(CapiError, match=r'"clustering\.prototypes" in another shape'):
        read_tensors(path, {"clustering.prototypes": torch.zeros(2, 2)})


class _Runs:
    """What a hostile index would hold: unpickling it makes a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.path),)


def test__an_index_cannot_run_code(learner: Learner, checkpoints: Checkpoints, tmp_path: Path) -> None:
    checkpoints.save(learner, Position(step=1))
    index = checkpoints.path(1) / ".metadata"
    index.write_bytes(pickle.dumps(_Runs(tmp_path / "owned")))
    with pytest.raises(CapiError, match="do not trust it"):
        read_tensors(checkpoints.path(1), tensors(learner))
    assert not (tmp_path / "owned").exists()


def test__an_index_cannot_point_elsewhere(learner: Learner, checkpoints: Checkpoints) -> None:
    checkpoints.save(learner, Position(step=1))
    index = checkpoints.path(1) / ".metadata"
    metadata = pickle.loads(index.read_bytes())  # noqa: S301 - our own file
    for info in metadata.storage_data.values():
        info.relative_path = "../../secret"
    index.write_bytes(pickle.dumps(metadata))
    with pytest.raises(CapiError, match="outside of the checkpoint"):
        SafeReader(checkpoints.path(1)).read_metadata()
