"""What the first version wrote is read by this one: runs, weights in every format, a probe, a file of features.

tests/reference/first_version.tar.xz holds three runs of 8 steps whose last checkpoint was removed, so that they stand
at step 4, with photos; and what the finished runs gave: features of both networks, exports, a probe and its score.
"""

import json
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import capi

ARCHIVE = Path(__file__).parent.parent / "reference" / "first_version.tar.xz"
KINDS = ("clustering", "pixels", "frozen")
EXPORTS = {
    "teacher.safetensors": "teacher",
    "transformers": "teacher",
    "student.pth": "student",
}


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    # The runs name their photos by a path from here.
    monkeypatch.chdir(tmp_path)
    return Path("first_version")


@pytest.fixture
def one_thread() -> Iterator[None]:
    """As the runs were trained: with more threads sums are added in another order."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def expected(saved: Path) -> dict[str, Tensor]:
    return load_file(saved / "expected.safetensors")


def assert_same_features(
    features: capi.Features, expected: dict[str, Tensor], name: str, *, exact: bool = False
) -> None:
    tolerance = 0 if exact else 1e-5
    for part in ("pooled", "registers", "feature_map"):
        torch.testing.assert_close(getattr(features, part), expected[f"{name}.{part}"], rtol=tolerance, atol=tolerance)


def computes_as_then(saved: Path, expected: dict[str, Tensor]) -> bool:
    """Whether this processor and torch give the bits of the features that were saved, of weights that were saved."""
    features = capi.load(saved / "exports" / "teacher.safetensors")(expected["images"])
    return torch.equal(features.feature_map, expected["clustering.teacher.feature_map"])


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("kind", KINDS)
def test__a_run_of_the_first_version_is_resumed_to_the_same_weights(
    saved: Path, expected: dict[str, Tensor], kind: str
) -> None:
    """Bit for bit, as the features of both networks show, where the machine computes as the one of then did.

    The clustering is the exception: it adds up in another order since numerics 3, and divides by other sums since 4.
    """
    exact = kind != "clustering" and computes_as_then(saved, expected)
    done = capi.pretrain(
        str(saved / kind / "config.yaml"), data=saved / "photos" / "images", out=saved / kind, resume=True, device="cpu"
    )
    assert done.finished
    for weights in ("teacher", "student"):
        encoder = capi.load(saved / kind, weights=weights)
        assert_same_features(encoder(expected["images"]), expected, f"{kind}.{weights}", exact=exact)


@pytest.mark.parametrize("name", EXPORTS)
def test__exports_of_the_first_version_give_the_same_features(
    saved: Path, expected: dict[str, Tensor], name: str
) -> None:
    encoder = capi.load(saved / "exports" / name)
    assert_same_features(encoder(expected["images"]), expected, f"clustering.{EXPORTS[name]}")


def test__an_onnx_file_of_the_first_version_gives_the_same_features(saved: Path, expected: dict[str, Tensor]) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    session = onnxruntime.InferenceSession(str(saved / "exports" / "teacher.onnx"))
    outputs = session.run(None, {session.get_inputs()[0].name: expected["images"].numpy()})
    features = {
        output.name: torch.from_numpy(value) for output, value in zip(session.get_outputs(), outputs, strict=True)
    }
    torch.testing.assert_close(
        features["feature_map"], expected["clustering.teacher.feature_map"], rtol=1e-4, atol=1e-4
    )


def test__a_probe_of_the_first_version_labels_photos(saved: Path) -> None:
    score = json.loads((saved / "results" / "results.json").read_text())["scores"]["test"]
    done = capi.evaluate(
        saved / "exports" / "teacher.safetensors",
        "csv/knn",
        [f"data={saved}/photos/labels.csv", "image_size=16", "workers=0", "validation_share=0.25"],
        device="cpu",
    )
    assert done.record["scores"]["test"] == score
    predicted = capi.predict(
        saved / "exports" / "teacher.safetensors",
        saved / "results" / "probe.safetensors",
        saved / "photos" / "images",
        out=saved / "labels",
        device="cpu",
    )
    assert predicted.images == 12


def test__a_file_of_features_of_the_first_version_finds_the_photo_itself(saved: Path) -> None:
    matches = capi.nearest(
        saved / "features.safetensors",
        saved / "photos" / "images" / "3.png",
        model=saved / "exports" / "teacher.safetensors",
        count=1,
        device="cpu",
    )
    assert matches[0].name == "3.png"


@pytest.mark.parametrize("kind", KINDS)
def test__report_and_doctor_read_a_run_of_the_first_version(saved: Path, kind: str) -> None:
    assert capi.report(saved / kind, device="cpu").stat().st_size > 10_000
    assert capi.doctor(saved / kind).findings
