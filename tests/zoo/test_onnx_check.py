from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from capi.errors import CapiError
from capi.models.features import CapiEncoder
from capi.zoo import onnx as onnx_files
from capi.zoo.onnx import check_onnx, compare_speed, difference

onnx = pytest.importorskip("onnx")


class Session:
    """Stands in for onnxruntime: the encoder itself, with something added to each value."""

    def __init__(self, encoder: CapiEncoder, added: float, names: tuple[str, ...]) -> None:
        self.encoder, self.added, self.names, self.shapes = encoder, added, names, []

    def get_inputs(self) -> list[SimpleNamespace]:
        return [SimpleNamespace(name="images")]

    def get_outputs(self) -> list[SimpleNamespace]:
        return [SimpleNamespace(name=name) for name in self.names]

    def run(self, _: None, given: dict[str, np.ndarray]) -> list[np.ndarray]:
        self.shapes.append(given["images"].shape)
        features = self.encoder(torch.from_numpy(given["images"]))._asdict()
        return [(features[name] + self.added).detach().numpy() for name in self.names]


@pytest.fixture
def stand_in(model: CapiEncoder, monkeypatch: pytest.MonkeyPatch) -> Any:
    def use(added: float, *names: str) -> Session:
        session = Session(model, added, names or ("pooled", "registers", "feature_map"))
        monkeypatch.setattr(onnx_files, "open_session", lambda path: session)
        return session

    return use


def graph_file(path: Path, output: str, shape: list[int]) -> Path:
    """An ONNX file that gives zeros of one shape, whatever the images are."""
    images = onnx.helper.make_tensor_value_info("images", onnx.TensorProto.FLOAT, ["b", 3, "h", "w"])
    zeros = onnx.helper.make_tensor_value_info(output, onnx.TensorProto.FLOAT, shape)
    value = onnx.helper.make_tensor("value", onnx.TensorProto.FLOAT, shape, np.zeros(shape).flatten())
    nodes = [onnx.helper.make_node("Constant", [], [output], value=value)]
    graph = onnx.helper.make_graph(nodes, "zeros", [images], [zeros])
    onnx.save(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)], ir_version=10), path)
    return path


def test__a_difference_is_that_of_numpy() -> None:
    expected, given = torch.randn(7, 5), torch.randn(7, 5)
    measured = difference(expected, given)
    reference, other = expected.double().numpy(), given.double().numpy()
    cosines = (reference * other).sum(1) / np.linalg.norm(reference, axis=1) / np.linalg.norm(other, axis=1)
    assert measured.absolute == pytest.approx(np.abs(reference - other).max())
    assert measured.relative == pytest.approx(np.abs(reference - other).max() / np.abs(reference).max())
    assert measured.cosine == pytest.approx(cosines.mean())
    assert measured.least_cosine == pytest.approx(cosines.min())


def test__nan_is_no_small_difference() -> None:
    given = torch.ones(2, 3)
    given[0, 0] = torch.nan
    assert not difference(torch.ones(2, 3), given).relative <= 1


def test__of_no_vectors_nothing_differs() -> None:
    assert difference(torch.empty(0, 3), torch.empty(0, 3)).absolute == 0


def test__two_resolutions_one_not_square_run_in_batches_of_one_and_three(stand_in: Any, model: CapiEncoder) -> None:
    session = stand_in(0.0)
    differences = check_onnx(model, Path("any.onnx"))
    assert set(differences) == {"pooled", "registers", "feature_map"}
    assert all(difference.absolute == 0 for difference in differences.values())
    assert sorted({shape[0] for shape in session.shapes}) == [1, 3]
    sizes = {shape[2:] for shape in session.shapes}
    assert len(sizes) == 2
    assert sorted(height == width for height, width in sizes) == [False, True]
    assert len(session.shapes) == 4


def test__a_difference_in_any_output_is_found(stand_in: Any, model: CapiEncoder) -> None:
    stand_in(0.25, "registers", "feature_map")
    differences = check_onnx(model, Path("any.onnx"))
    assert set(differences) == {"registers", "feature_map"}
    assert all(difference.absolute == pytest.approx(0.25, abs=1e-5) for difference in differences.values())


def test__images_of_ones_own_are_used(stand_in: Any, model: CapiEncoder) -> None:
    session = stand_in(0.0)
    check_onnx(model, Path("any.onnx"), batches=[torch.randn(2, 3, 8, 4)])
    assert session.shapes == [(2, 3, 8, 4)]


def test__a_model_in_training_or_of_another_precision_is_checked_as_it_would_be_used(
    stand_in: Any, model: CapiEncoder
) -> None:
    stand_in(0.0)
    assert check_onnx(model, Path("any.onnx"))["feature_map"].absolute == 0
    for block in model.encoder.blocks:
        block.drop_rate = 0.5
    model.train()
    differences = check_onnx(model, Path("any.onnx"), batches=[torch.randn(1, 3, 8, 8)])
    # The stand-in did drop branches; the encoder that it was compared with did not.
    assert model.training
    assert set(differences) == {"pooled", "registers", "feature_map"}


def test__a_file_that_is_none_of_ours_is_refused(tmp_path: Path, model: CapiEncoder) -> None:
    pytest.importorskip("onnxruntime")
    with pytest.raises(CapiError, match="is no file"):
        check_onnx(model, tmp_path / "absent.onnx")
    (tmp_path / "text.onnx").write_text("no graph")
    with pytest.raises(CapiError, match=r"text\.onnx cannot be opened by onnxruntime"):
        check_onnx(model, tmp_path / "text.onnx")
    with pytest.raises(CapiError, match="gives logits: it is no encoder"):
        check_onnx(model, graph_file(tmp_path / "other.onnx", "logits", [1, 2]))
    with pytest.raises(CapiError, match="was written from another model"):
        check_onnx(model, graph_file(tmp_path / "wrong.onnx", "registers", [1, 5, 32]))


def test__a_file_of_constants_differs(tmp_path: Path, model: CapiEncoder) -> None:
    pytest.importorskip("onnxruntime")
    path = graph_file(tmp_path / "zeros.onnx", "feature_map", [1, 2, 3, 32])
    images = torch.randn(1, 3, 8, 12)
    measured = check_onnx(model, path, batches=[images])["feature_map"]
    largest: Tensor = model(images).feature_map.abs().max()
    assert measured.absolute == pytest.approx(largest.item())
    assert measured.relative == pytest.approx(1)


def test__times_are_given_for_pytorch_and_each_file(tmp_path: Path, model: CapiEncoder) -> None:
    pytest.importorskip("onnxruntime")
    files = {"zeros": graph_file(tmp_path / "zeros.onnx", "feature_map", [1, 2, 2, 32])}
    seconds = compare_speed(model, files, size=(64, 64), rounds=2)
    assert set(seconds) == {"PyTorch", "zeros"}
    assert 0 < seconds["zeros"] < seconds["PyTorch"]
