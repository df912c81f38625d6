"""Measures of health against slow or known versions, and that measuring changes nothing."""

import math
from collections.abc import Callable
from itertools import pairwise
from statistics import mean, stdev

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.metrics import mutual_info_score
from torch import Tensor

from capi.config.files import parse_config
from capi.config.schema import Config
from capi.method import health
from capi.method.clustering import OnlineClustering
from capi.method.health import HealthMonitor, NoObserver, Observer
from capi.method.masking import PatchGrid
from capi.runtime.randomness import sample_keys
from capi.train.build import build_learner, mask_sampler
from capi.train.step import train_step
from capi.types import MaskedBatch

POSITIONS, WIDTH = 16, 6
Draw = Callable[[int], Tensor]


def independent(images: int) -> Tensor:
    return torch.randn(images, POSITIONS, WIDTH)


def alike_within_an_image(images: int) -> Tensor:
    return 3 * torch.randn(images, 1, WIDTH) + torch.randn(images, POSITIONS, WIDTH)


def smooth_within_an_image(images: int) -> Tensor:
    """Neighbors are alike, around a ring, so that no position differs from any other."""
    noise = torch.randn(images, POSITIONS, WIDTH)
    return sum((noise.roll(shift, 1) for shift in range(1, 6)), start=noise)


MEANINGLESS = (independent, alike_within_an_image, smooth_within_an_image)


def standard_errors_from_zero(values: list[float]) -> float:
    return mean(values) / (stdev(values) / math.sqrt(len(values)))


@pytest.mark.parametrize("draw", MEANINGLESS)
@pytest.mark.parametrize("images", [2, 8])
def test__the_share_of_meaningless_positions_is_zero_on_average(draw: Draw, images: int) -> None:
    shares, uncorrected = [], []
    for _ in range(400):
        tokens = draw(images)
        shares.append(float(health.position_share(tokens)))
        centerd = tokens - tokens.mean((0, 1))
        uncorrected.append(float(centerd.mean(0).square().mean() / centerd.square().mean()))
    assert abs(standard_errors_from_zero(shares)) < 3.5
    # Without the correction it would be far off.
    assert standard_errors_from_zero(uncorrected) > 15
    assert mean(uncorrected) > 10 * abs(mean(shares))


@pytest.mark.parametrize("draw", MEANINGLESS)
@pytest.mark.parametrize("images", [2, 8])
def test__the_information_of_meaningless_positions_is_zero_on_average(draw: Draw, images: int) -> None:
    information, uncorrected = [], []
    for _ in range(150):
        nearest = draw(images).argmax(2)
        information.append(float(health.position_information(nearest)))
        uncorrected.append(float(health.plain_information(nearest)))
    assert abs(standard_errors_from_zero(information)) < 3.5
    assert standard_errors_from_zero(uncorrected) > 15
    assert mean(uncorrected) > 10 * abs(mean(information))


@pytest.mark.parametrize("strength", [0.0, 0.5, 1.0, 3.0])
def test__the_share_of_known_effects_is_found(strength: float) -> None:
    images, of_image, of_noise = 2000, 2.0, 1.0
    effect = torch.randn(POSITIONS, WIDTH)
    effect = strength * (effect - effect.mean(0)) / effect.std(0, correction=0)
    tokens = of_image**0.5 * torch.randn(images, 1, WIDTH) + effect
    tokens = tokens + of_noise**0.5 * torch.randn(images, POSITIONS, WIDTH)
    share = strength**2 / (strength**2 + of_image + of_noise)
    assert float(health.position_share(tokens)) == pytest.approx(share, abs=0.015)


def test__features_that_are_position_alone_have_a_share_of_one() -> None:
    tokens = torch.randn(1, POSITIONS, WIDTH).expand(5, -1, -1)
    assert float(health.position_share(tokens)) == pytest.approx(1, abs=1e-5)
    assert float(health.position_share(torch.ones(5, POSITIONS, WIDTH))) == 0


def test__both_measures_rise_with_each_strength_of_position() -> None:
    """Features like those of a network: few strong directions and many weak, patches of an image alike."""
    images, positions, width = 64, 49, 48
    spectrum = torch.arange(1, width + 1).float().rsqrt()
    content = torch.randn(images, 1, width) * spectrum + torch.randn(images, positions, width) * spectrum
    place, prototypes = torch.randn(positions, width) * spectrum, torch.randn(64, width)
    shares, informations = [], []
    for strength in (0.0, 0.3, 0.6, 1.0, 2.0, 4.0):
        tokens = F.normalize(content + strength * place, dim=-1)
        nearest, _ = health.nearest_prototypes(tokens.flatten(0, 1), prototypes, None)
        shares.append(float(health.position_share(tokens)))
        informations.append(float(health.position_information(nearest.view(images, positions))))
    for values in (shares, informations):
        assert abs(values[0]) < 0.02
        assert all(later > earlier + 0.01 for earlier, later in pairwise(values)), values


def test__prototypes_that_are_positions_have_all_the_information_that_chance_leaves() -> None:
    generator = np.random.default_rng(0)
    for images, tolerance in ((4, 0.06), (1000, 0.02)):
        position = np.tile(np.arange(POSITIONS), (images, 1))
        shuffled = [generator.permuted(position, axis=1) for _ in range(50)]
        by_chance = np.mean([mutual_info_score(position.ravel(), order.ravel()) for order in shuffled])
        information = float(health.position_information(torch.from_numpy(position)))
        assert information == pytest.approx(math.log(POSITIONS) - by_chance, abs=tolerance)
    assert information == pytest.approx(math.log(POSITIONS), abs=0.02)


def test__information_is_drawn_the_same_every_time() -> None:
    nearest = torch.randint(0, 5, (6, POSITIONS))
    before = torch.get_rng_state()
    assert torch.equal(health.position_information(nearest), health.position_information(nearest))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("prototypes", [1, 7, 300])
def test__plain_information_is_that_of_scikit_learn(prototypes: int) -> None:
    nearest = (torch.rand(9, POSITIONS) ** 2 * prototypes).long() * 3
    position = torch.arange(POSITIONS).expand(9, -1)
    expected = mutual_info_score(position.flatten().numpy(), nearest.flatten().numpy())
    assert float(health.plain_information(nearest)) == pytest.approx(expected, abs=1e-5)


def rank_by_numpy(rows: Tensor) -> float:
    variances = np.linalg.eigvalsh(np.cov(rows.double().numpy().T))
    shares = variances[variances > 1e-12] / variances.sum()
    return float(np.exp(-(shares * np.log(shares)).sum()))


@pytest.mark.parametrize(("count", "width"), [(50, 12), (12, 12), (7, 12), (2, 12)])
def test__effective_rank_is_that_of_the_eigenvalues(count: int, width: int) -> None:
    rows = torch.randn(count, width) * torch.arange(1, width + 1) + 5
    assert float(health.effective_rank(rows)) == pytest.approx(rank_by_numpy(rows), rel=1e-4)


@pytest.mark.parametrize("alike", [1, 3, 8])
def test__equal_variances_along_some_directions_have_that_rank(alike: int) -> None:
    axes = torch.linalg.qr(torch.randn(8, 8)).Q[:alike]
    rows = torch.cat([axes, -axes]).repeat(3, 1) + torch.randn(8)
    assert float(health.effective_rank(rows)) == pytest.approx(alike, rel=1e-5)


def test__features_without_variance_have_rank_one_and_broken_ones_none() -> None:
    assert float(health.effective_rank(torch.ones(5, 3))) == 1
    assert math.isnan(health.effective_rank(torch.tensor([[1.0, torch.nan], [0.0, 1.0]])))


def test__recent_use_adds_new_patches_and_fades_old_ones() -> None:
    recent, counts = torch.tensor([4.0, 0.0, 8.0]), torch.tensor([1.0, 0.0, 3.0])
    # Four patches are 4 / 60 of what three prototypes remember.
    assert health.remember(recent, counts).tolist() == pytest.approx([4 * 56 / 60 + 1, 0, 8 * 56 / 60 + 3], rel=1e-6)


def test__what_is_remembered_is_twenty_patches_a_prototype_in_their_true_shares() -> None:
    recent, counts = torch.zeros(4), torch.tensor([3.0, 2.0, 1.0, 0.0])
    for _ in range(200):
        recent = health.remember(recent, counts)
    assert recent.tolist() == pytest.approx([40, 80 / 3, 40 / 3, 0], rel=1e-4)
    # A batch that is larger than the memory is all that is remembered.
    assert health.remember(recent, counts * 50).tolist() == [150, 100, 50, 0]


def slow_perplexity(recent: list[float]) -> float:
    shares = [count / sum(recent) for count in recent]
    return math.exp(-sum(share * math.log(share) for share in shares if share)) / len(recent)


def test__perplexity_and_dead_share_count_as_one_would_by_hand() -> None:
    recent = (torch.rand(200) ** 8 * 100).float()
    values = recent.tolist()
    assert sum(values) > 5 * 200
    dead = sum(count < 0.05 * sum(values) / 200 for count in values)
    assert 0 < dead < 200
    assert float(health.perplexity(recent)) == pytest.approx(slow_perplexity(values), rel=1e-5)
    assert float(health.dead_share(recent)) == pytest.approx(dead / 200)
    assert float(health.perplexity(torch.full((9,), 7.0))) == pytest.approx(1)
    assert float(health.dead_share(torch.full((9,), 7.0))) == 0


def test__use_is_unknown_before_five_patches_a_prototype() -> None:
    few, enough = torch.tensor([20.0, 10.0, 9.0, 0.9]), torch.tensor([10.0, 4.0, 6.0, 0.0])
    assert few.sum() > enough.sum() == 20
    for measure in (health.perplexity, health.dead_share):
        assert measure(enough) is not None
        assert measure(enough * 0.99) is None
        assert measure(torch.zeros(4)) is None


def test__distance_and_gradients_are_those_of_all_weights_as_one_vector() -> None:
    ours, theirs = ([torch.randn(3, 4), torch.randn(5)] for _ in range(2))
    first, second = (torch.cat([weight.flatten() for weight in each]) for each in (ours, theirs))
    expected = torch.dist(first, second) / second.norm()
    torch.testing.assert_close(health.relative_distance(ours, theirs), expected)
    weights = [torch.nn.Parameter(weight) for weight in ours]
    assert float(health.gradient_norm(weights)) == 0
    weights[0].grad = torch.full((3, 4), 2.0)
    assert float(health.gradient_norm(weights)) == pytest.approx(2 * math.sqrt(12))


def test__nearest_prototypes_in_parts_are_those_of_all_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "_LOGITS", 1000)
    rows, prototypes, bias = torch.randn(50, 6), torch.randn(300, 6), torch.randn(300)
    logits = rows @ prototypes.T + bias
    of_all, of_few = health.nearest_prototypes(rows, prototypes, bias)
    assert torch.equal(of_all, logits.argmax(1))
    assert torch.equal(of_few, logits[:, :256].argmax(1))


def test__some_images_and_positions_are_looked_at_spread_evenly() -> None:
    positions = torch.arange(200.0).expand(30, 200)
    parts = [torch.stack([torch.full((30, 200), float(number)), positions], 2) for number in range(3)]
    seen = health.some_tokens(parts)
    assert seen.shape == (64, 64, 2)
    assert seen[:, 0, 0].tolist() == [0.0] * 30 + [1.0] * 30 + [2.0] * 4
    assert seen[0, 0, 1] == 0
    assert seen[0, -1, 1] == 199
    assert set(seen[0, :, 1].diff().tolist()) == {3.0, 4.0}
    small = torch.randn(2, 5, 3)
    assert torch.equal(health.some_tokens([small]), small)


def batch_of(config: Config, images: int) -> MaskedBatch:
    keys = sample_keys(config.seed, 0, torch.arange(images))
    visible, predict = mask_sampler(config)(PatchGrid(*config.grid), keys)
    shape = (images, 3, *config.data.height_and_width)
    return MaskedBatch(torch.randn(shape, generator=torch.Generator().manual_seed(1)), visible, predict)


def test__measuring_changes_neither_weights_nor_random_numbers(small_config: Config) -> None:
    """The config drops branches at random after the tokens were looked at."""
    results = []
    for observer in (None, HealthMonitor()):
        learner, batch = build_learner(small_config), batch_of(small_config, 6)
        torch.manual_seed(3)
        for step in range(4, 7):
            metrics = train_step(learner, [batch], step, observer)
        modules = (learner.student, learner.teacher, learner.target)
        weights = [parameter.detach().clone() for module in modules for parameter in module.parameters()]
        results.append([*metrics[:2], *metrics.described.values(), *weights, torch.get_rng_state()])
    assert all(torch.equal(without, measured) for without, measured in zip(*results, strict=True))
    assert len(observer.values()) == 8
    assert learner.target.recent_use.sum() > 0


def test__micro_batches_are_seen_as_one_batch(small_config: Config) -> None:
    tree = small_config.model_dump(mode="json")
    tree["model"]["stochastic_depth"] = 0.0
    config = parse_config(tree)
    batch, measures = batch_of(config, 6), []
    for parts in ([batch], [MaskedBatch(*(value[start : start + 2] for value in batch[:3])) for start in (0, 2, 4)]):
        learner, monitor = build_learner(config), HealthMonitor()
        train_step(learner, parts, 5, monitor)
        measures.append((monitor.values(), learner.target.recent_use))
    assert measures[0][0] == pytest.approx(measures[1][0], rel=1e-3, abs=1e-6)
    assert torch.equal(measures[0][1], measures[1][1])


def test__a_monitor_finds_what_the_measures_say_of_the_tokens(small_config: Config) -> None:
    learner, monitor, batch = build_learner(small_config), HealthMonitor(), batch_of(small_config, 6)
    tokens = F.normalize(learner.teacher(batch.images), dim=-1)
    train_step(learner, [batch], 5, monitor)
    values = monitor.values()
    assert values["position_share"] == pytest.approx(float(health.position_share(tokens)), rel=1e-4)
    assert values["effective_rank"] == pytest.approx(rank_by_numpy(tokens.flatten(0, 1)), rel=1e-3)
    # The teacher starts as the student, and is looked at before it follows.
    assert values["teacher_gap"] == 0
    train_step(learner, [batch], 6, monitor)
    assert monitor.values()["teacher_gap"] > 0
    assert min(values["student_gradient"], values["clustering_gradient"]) > 0


def test__one_image_tells_nothing_of_position(small_config: Config) -> None:
    monitor = HealthMonitor()
    train_step(build_learner(small_config), [batch_of(small_config, 1)], 5, monitor)
    values = monitor.values()
    assert {name for name, value in values.items() if value is None} == {
        "position_share",
        "position_information",
        "prototype_perplexity",
        "dead_prototypes",
    }
    assert all(math.isfinite(value) for value in values.values() if value is not None)


def test__broken_tokens_are_reported_and_not_remembered() -> None:
    clustering, monitor = OnlineClustering(width=4, prototypes=3), HealthMonitor()
    monitor.tokens([torch.randn(5, 7, 4)], clustering)
    before = clustering.recent_use.clone()
    assert before.sum() == 35
    monitor.tokens([torch.full((5, 7, 4), torch.nan)], clustering)
    assert torch.equal(clustering.recent_use, before)
    assert math.isnan(monitor.values()["effective_rank"])
    assert math.isnan(monitor.values()["position_share"])


def test__monitor_and_no_observer_fulfil_the_contract() -> None:
    assert isinstance(HealthMonitor(), Observer)
    assert isinstance(NoObserver(), Observer)
