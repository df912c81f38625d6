import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from capi.config.files import load_config, parse_config
from capi.config.schema import Config
from capi.train.build import build_learner
from capi.train.cost.flop import encoder_flop, iteration_flop
from capi.train.step import Learner, train_step
from capi.types import MaskedBatch
from capi.zoo.build import build_student
from tests.train.test_step import batch_of
from tests.variants import PREDICTORS, TARGETS, learner_of, varied


def test__equals_what_torch_counts_in_one_iteration() -> None:
    config = parse_config(
        {
            "data": {"image_size": [32, 24]},
            "model": {"width": 32, "depth": 4, "heads": 2, "patch_size": 4, "predictor": {"width": 48, "heads": 3}},
            "clustering": {"prototypes": 40},
            "optimization": {"batch_size": 10},
        }
    )
    learner = build_learner(config)
    batch = batch_of(config)
    ours, counted = flop_of(learner, batch)
    counted += beyond_the_clustering(batch, width=32, prototypes=40)
    assert ours == pytest.approx(counted, rel=1e-9)


def flop_of(learner: Learner, batch: MaskedBatch) -> tuple[int, int]:
    """Ours and torch's count of one step of 10 images.

    torch counts no FLOP for flash attention on a CPU, and none for products that are added in place.
    """
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        train_step(learner, [batch], 0)
    ours = iteration_flop(
        learner.student,
        learner.target,
        batch_size=10,
        patches=48,
        visible=batch.visible_index.shape[1],
        predicted=batch.predict_index.shape[1],
    )
    return 10 * sum(ours), counter.get_total_flops()


def beyond_the_clustering(batch: MaskedBatch, *, width: int, prototypes: int) -> int:
    """What we do not count of the clustering of 10 images, since it is not required, in negative FLOP.

    We leave out the logits of predicted patches, which are computed twice. Sinkhorn-Knopp has no matrix products.
    """
    return -2 * batch.predict_index.numel() * width * prototypes


COUNTED = PREDICTORS | {"mlp": ["model.head=mlp"], "learned": ["model.positions=learned"]}
COUNTED |= {name: TARGETS[name] for name in ("ema_head", "features", "pixels", "frozen")}
COUNTED |= {"queue": ["clustering.queue=30"]}
COUNTED |= {"wide self": ["model.predictor.kind=self", "model.predictor.width=48", "model.predictor.heads=3"]}


@pytest.mark.parametrize("name", COUNTED)
def test__variants_need_what_torch_counts(small_config: Config, name: str) -> None:
    config = varied(small_config, *COUNTED[name], "optimization.batch_size=10")
    learner, batch = learner_of(config), batch_of(config)
    if config.clustering.queue:
        learner.target.queue.pretend_full()
    ours, counted = flop_of(learner, batch)
    if config.target.kind == "clustering":
        counted += beyond_the_clustering(batch, width=32, prototypes=24)
    assert ours == pytest.approx(counted, rel=1e-9)


def test__vit_l_14_needs_the_flop_of_the_paper() -> None:
    with torch.device("meta"):
        student = build_student(load_config("vitl14"))
    assert encoder_flop(student.encoder, 256) == pytest.approx(1.70e11, rel=0.02)
