import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from capi.errors import CapiError
from capi.models.features import CapiEncoder
from capi.zoo import onnx as onnx_files
from capi.zoo.onnx import Difference, write_onnx
from tests.zoo.test_onnx_trace import small_encoder

SAME = Difference(absolute=1e-6, relative=1e-6, cosine=1.0, least_cosine=1.0)


@pytest.fixture
def without_tracing(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Files of a few bytes in place of graphs, and a check that finds what it is asked to find."""

    def use(measured: Difference = SAME, *, beside: bool = False) -> None:
        def save(encoder: CapiEncoder, path: Path, **_: object) -> None:
            path.write_bytes(b"graph")
            if beside:
                path.with_name(f"{path.name}.data").write_bytes(b"weights")

        monkeypatch.setattr(onnx_files, "_save", save)
        monkeypatch.setattr(onnx_files, "check_onnx", lambda encoder, path: {"feature_map": measured})
        monkeypatch.setattr(onnx_files, "compare_speed", lambda encoder, files: dict.fromkeys(files, 1.0))

    return use


def test__a_folder_is_refused(tmp_path: Path, model: CapiEncoder) -> None:
    with pytest.raises(CapiError, match="is a folder: give the name of a file"):
        write_onnx(model, tmp_path)


def test__an_opset_that_is_too_old_is_refused(tmp_path: Path, model: CapiEncoder) -> None:
    with pytest.raises(CapiError, match="opset 18 to 23, and 11 was asked for: use a newer runtime"):
        write_onnx(model, tmp_path / "encoder.onnx", opset=11)


def test__a_missing_library_is_named_by_its_extra(
    tmp_path: Path, model: CapiEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "onnxscript" else real(name))
    with pytest.raises(CapiError, match=r"pip install 'capi\[onnx\]'"):
        write_onnx(model, tmp_path / "encoder.onnx")


def test__a_file_is_only_overwritten_when_asked(tmp_path: Path, model: CapiEncoder, without_tracing: Any) -> None:
    without_tracing()
    out = tmp_path / "new" / "encoder.onnx"
    assert write_onnx(model, out).path == out
    out.write_bytes(b"mine")
    with pytest.raises(CapiError, match="exists"):
        write_onnx(model, out)
    assert out.read_bytes() == b"mine"
    write_onnx(model, out, overwrite=True)
    assert out.read_bytes() == b"graph"
    assert [path.name for path in out.parent.iterdir()] == ["encoder.onnx"]


@pytest.mark.parametrize("relative", [1e-3, float("nan")])
def test__a_graph_that_computes_something_else_is_not_kept(
    tmp_path: Path, model: CapiEncoder, without_tracing: Any, relative: float
) -> None:
    without_tracing(Difference(absolute=1.0, relative=relative, cosine=1.0, least_cosine=1.0))
    with pytest.raises(CapiError, match="nothing was written"):
        write_onnx(model, tmp_path / "encoder.onnx")
    assert list(tmp_path.iterdir()) == []


def test__an_overflow_in_half_precision_is_not_kept(
    tmp_path: Path, model: CapiEncoder, without_tracing: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_tracing()
    nan = float("nan")
    measured = iter([SAME, Difference(absolute=nan, relative=nan, cosine=nan, least_cosine=nan)])
    monkeypatch.setattr(onnx_files, "check_onnx", lambda encoder, path: {"feature_map": next(measured)})
    with pytest.raises(CapiError, match="in float16 this model gives feature_map that are NaN"):
        write_onnx(model, tmp_path / "encoder.onnx", precision="float16")
    assert list(tmp_path.iterdir()) == []


def test__weights_too_large_for_the_file_lie_beside_it(
    tmp_path: Path, model: CapiEncoder, without_tracing: Any
) -> None:
    without_tracing(beside=True)
    written = write_onnx(model, tmp_path / "encoder.onnx")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["encoder.onnx", "encoder.onnx.data"]
    assert written.size == len(b"graph") + len(b"weights")
    with pytest.raises(CapiError, match="int8 is made of models up to 2 GB"):
        write_onnx(model, tmp_path / "small.onnx", precision="int8")


def test__without_onnxruntime_nothing_is_checked(
    tmp_path: Path, model: CapiEncoder, without_tracing: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_tracing()
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "onnxruntime" else real(name))
    assert write_onnx(model, tmp_path / "encoder.onnx").differences is None
    with pytest.raises(CapiError, match=r"float16 needs an extra: pip install 'capi\[onnx\]'"):
        write_onnx(model, tmp_path / "half.onnx", precision="float16")


def opened(path: Path) -> Any:
    onnxruntime = pytest.importorskip("onnxruntime")
    return onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])


@pytest.mark.thorough
@pytest.mark.usefixtures("sizes_are_symbols")
def test__half_precision_is_inside_alone_and_close(tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    written = write_onnx(small_encoder("axial", "cross", 2), tmp_path / "half.onnx", precision="float16")
    assert [path.name for path in tmp_path.iterdir()] == ["half.onnx"]
    session = opened(written.path)
    assert {tensor.type for tensor in [*session.get_inputs(), *session.get_outputs()]} == {"tensor(float)"}
    assert written.differences["feature_map"].least_cosine > 0.999
    assert written.differences["feature_map"].absolute > 1e-5
    assert set(written.seconds) == {"PyTorch", "ONNX float32", "ONNX float16"}
    assert json.loads(session.get_modelmeta().custom_metadata_map["precision"]) == "float16"


@pytest.mark.thorough
@pytest.mark.usefixtures("sizes_are_symbols")
# The newest has attention as one operator, the oldest as two products of tokens.
@pytest.mark.parametrize(("opset", "left"), [(18, 3), (23, 1)])
def test__eight_bits_are_close_and_take_integers(tmp_path: Path, opset: int, left: int) -> None:
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    written = write_onnx(small_encoder("axial", "fused", 2), tmp_path / "small.onnx", precision="int8", opset=opset)
    model = onnx.load(written.path)
    # Of one block: four of attention and two of the MLP. The patch embedding and products of tokens stay as they are.
    assert sum(node.op_type == "MatMulInteger" for node in model.graph.node) == 6
    assert sum(node.op_type == "MatMul" for node in model.graph.node) == left
    assert {entry.key: entry.value for entry in model.metadata_props}["precision"] == '"int8"'
    assert 0.99 < written.differences["feature_map"].cosine < 1
    assert set(written.seconds) == {"PyTorch", "ONNX float32", "ONNX int8"}


@pytest.mark.thorough
@pytest.mark.usefixtures("sizes_are_symbols")
def test__the_file_says_what_its_user_must_know_and_nothing_of_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("onnxscript")
    monkeypatch.setattr(onnx_files, "LARGEST_WEIGHTS", 100)
    encoder = small_encoder("axial", "fused", 2)
    encoder.image_size = (8, 12)
    written = write_onnx(encoder, tmp_path / "encoder.onnx", pooled=False, opset=20)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["encoder.onnx", "encoder.onnx.data"]
    assert b".py" not in written.path.read_bytes()
    session = opened(written.path)
    assert [tensor.name for tensor in session.get_outputs()] == ["registers", "feature_map"]
    assert session.get_inputs()[0].shape == ["batch", 3, "height", "width"]
    values = {name: json.loads(value) for name, value in session.get_modelmeta().custom_metadata_map.items()}
    assert (values["patch_size"], values["width"], values["std"]) == (4, 16, [0.229, 0.224, 0.225])
    assert values["image_size"] == [8, 12]
    images = torch.randn(1, 3, 8, 12)
    feature_map = torch.from_numpy(session.run(["feature_map"], {"images": images.numpy()})[0])
    torch.testing.assert_close(feature_map, encoder(images).feature_map, atol=1e-5, rtol=1e-5)
    # Sides that are no multiples of the patch size are an error of the runtime, not wrong features.
    with pytest.raises(Exception, match="reshape"):
        session.run(None, {"images": torch.randn(1, 3, 9, 12).numpy()})
