import json
import logging
import warnings
from pathlib import Path

import pytest
import torch

from capi.errors import CapiError
from capi.models.encoder import Encoder
from capi.models.features import CapiEncoder
from capi.models.heads import LinearHead
from capi.models.positions import patch_coordinates, rotary_table, rotate
from capi.models.predictor import CrossPredictor, FusedPredictor, Predictor, SelfPredictor
from capi.types import Statistics
from capi.zoo.onnx import NEWEST_OPSET, OLDEST_OPSET, check_onnx, facts, plain_copy, quietly, refuse_opset, trace

GRID = (4, 4)


def small_encoder(positions: str, kind: str, registers: int) -> CapiEncoder:
    """As shallow as can be: tracing takes seconds for each block."""
    encoder = Encoder(
        width=16, depth=1, heads=1, patch_size=4, registers=registers, mlp_width=16, positions=positions, grid=GRID
    )
    sizes = {"width": 8, "depth": 1, "heads": 1, "context_width": 16, "mlp_width": 8}
    predictor: Predictor = FusedPredictor(width=16)
    if kind != "fused":
        split = CrossPredictor if kind == "cross" else SelfPredictor
        predictor = split(**sizes, positions=positions, grid=GRID)
    return CapiEncoder(encoder=encoder, predictor=predictor).eval()


@pytest.mark.parametrize("opset", [OLDEST_OPSET - 1, NEWEST_OPSET + 1])
def test__an_opset_that_cannot_be_written_is_refused(opset: int, model: CapiEncoder) -> None:
    with pytest.raises(CapiError, match=f"opset 18 to 23, and {opset} was asked for"):
        trace(model, opset=opset, pooled=True)
    refuse_opset(OLDEST_OPSET)
    refuse_opset(NEWEST_OPSET)


def test__the_copy_is_plain_and_the_encoder_stays_as_it_was(model: CapiEncoder) -> None:
    model.head = LinearHead(width=48, outputs=8)
    model.statistics = Statistics((0.5,) * 3, (0.25,) * 3)
    model.to(torch.bfloat16).train()
    copied = plain_copy(model)
    assert not copied.training
    assert copied.head is None
    assert copied.statistics == model.statistics
    assert {value.dtype for value in copied.parameters()} == {torch.float32}
    assert not any(value.requires_grad for value in copied.parameters())
    assert model.training
    assert {value.dtype for value in model.parameters()} == {torch.bfloat16}
    assert torch.equal(copied.encoder.registers, model.encoder.registers.float())


def test__a_plain_encoder_is_not_copied(model: CapiEncoder) -> None:
    assert plain_copy(model) is model
    assert plain_copy(model, torch.float16) is not model


def test__facts_are_values_of_json(model: CapiEncoder) -> None:
    values = {name: json.loads(value) for name, value in facts(model, "int8").items()}
    assert values["patch_size"] == 4
    assert values["mean"] == [0.485, 0.456, 0.406]
    assert (values["width"], values["registers"], values["channels"], values["precision"]) == (32, 4, 3, "int8")


def test__libraries_at_work_are_silent_and_leave_logging_as_it_was(caplog: pytest.LogCaptureFixture) -> None:
    handlers = list(logging.root.handlers)
    with quietly():
        logging.getLogger("torch.onnx").warning("about itself")
        logging.root.addHandler(logging.NullHandler())
        warnings.warn("about itself", FutureWarning, stacklevel=1)
    assert caplog.records == []
    assert logging.root.handlers == handlers
    logging.getLogger("torch.onnx").warning("heard")
    assert [record.message for record in caplog.records] == ["heard"]


@pytest.mark.parametrize("variant", ["axial", "released"])
def test__what_is_written_otherwise_for_a_graph_is_the_same(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    places = patch_coordinates(3, 7)[None]
    x, table = torch.randn(2, 21, 2, 8), rotary_table(places, 8, variant)
    rotated = rotate(x, table)
    grids = [(rows, columns) for rows in (1, 2, 5, 16) for columns in (1, 3, 14)]
    coordinates = [patch_coordinates(*grid) for grid in grids]
    monkeypatch.setattr(torch.compiler, "is_exporting", lambda: True)
    torch.testing.assert_close(rotate(x, table), rotated)
    for grid, expected in zip(grids, coordinates, strict=True):
        torch.testing.assert_close(patch_coordinates(*grid), expected)


def test__learned_positions_work_in_half_precision() -> None:
    encoder = small_encoder("learned", "cross", 2)
    images = torch.randn(2, 3, 12, 20)
    expected = encoder(images).feature_map
    halved = plain_copy(encoder, torch.float16)(images.half()).feature_map
    assert halved.dtype == torch.float16
    torch.testing.assert_close(halved.float(), expected, atol=0.03, rtol=0.03)


@pytest.mark.thorough
@pytest.mark.usefixtures("sizes_are_symbols")
@pytest.mark.parametrize(
    ("positions", "kind", "registers"),
    [("axial", "cross", 4), ("released", "self", 3), ("learned", "cross", 0), ("axial", "fused", 1)],
)
def test__every_kind_of_model_gives_pytorchs_features_at_any_size(
    tmp_path: Path, positions: str, kind: str, registers: int
) -> None:
    pytest.importorskip("onnxscript")
    pytest.importorskip("onnxruntime")
    encoder = small_encoder(positions, kind, registers)
    trace(encoder, opset=OLDEST_OPSET, pooled=True).save(tmp_path / "encoder.onnx")
    # A single patch and single rows and columns are where symbols and grids go wrong.
    sizes = [(1, 4, 4), (2, 4, 12), (1, 20, 4), (3, 16, 16), (1, 24, 40)]
    batches = [torch.randn(batch, 3, height, width) for batch, height, width in sizes]
    differences = check_onnx(encoder, tmp_path / "encoder.onnx", batches=batches)
    assert set(differences) == {"pooled", "registers", "feature_map"}
    assert max(difference.relative for difference in differences.values()) < 1e-5
