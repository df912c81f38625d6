"""A queue of earlier tokens, against a plain version that concatenates queue and batch."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from capi.config.schema import Config
from capi.data.loader import BatchShare
from capi.errors import CapiError
from capi.method.clustering import OnlineClustering
from capi.method.clustering.queue import QueueShape, TokenQueue
from capi.method.clustering.walk import ClusteringSettings, cluster
from capi.train.build import build_learner, build_networks
from capi.train.checkpoint import Checkpoints, Position, tensors
from capi.train.step import train_step
from capi.types import OneProcess
from tests.method.queue_parts import local_part, whole_of_parts
from tests.method.slow_clustering import Results, assert_close, slow
from tests.method.test_walk import PeakBytes
from tests.train.test_step import batch_of, states
from tests.variants import varied

IMAGES, POSITIONS, WIDTH, PROTOTYPES = 4, 6, 16, 30
# Everything in one slice; a few positions; one.
BUDGETS = [None, 16_000, 8_000]


def clustering_with(batches: int, settings: ClusteringSettings | None = None, **shape: Any) -> OnlineClustering:
    queue = QueueShape(batches, **({"images": IMAGES, "positions": POSITIONS} | shape)) if batches else None
    torch.manual_seed(0)
    clustering = OnlineClustering(width=WIDTH, prototypes=PROTOTYPES, settings=settings, queue=queue)
    torch.nn.init.normal_(clustering.bias)
    return clustering


def everywhere(tokens: Tensor) -> Tensor:
    return torch.arange(tokens.shape[1]).expand(len(tokens), -1)


def run(clustering: OnlineClustering, parts: Sequence[Tensor]) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Loss, all targets and gradients."""
    clustering.zero_grad()
    loss, targets = clustering(list(parts), [everywhere(part) for part in parts])
    targets = torch.cat(list(targets))
    loss.backward()
    return loss.detach(), targets, [weight.grad for weight in clustering.parameters()]


@pytest.mark.parametrize(("budget", "micro_batches"), [*((budget, 1) for budget in BUDGETS), (None, 2), (8_000, 2)])
@pytest.mark.parametrize("sinkhorn", ["positionwise", "standard"])
def test__the_batch_is_balanced_with_the_last_batches_and_alone_makes_loss_gradient_and_targets(
    sinkhorn: Any, budget: int | None, micro_batches: int
) -> None:
    clustering = clustering_with(2, ClusteringSettings(sinkhorn=sinkhorn, chunk_bytes=budget))
    batches = [torch.randn(IMAGES, POSITIONS, WIDTH) for _ in range(4)]
    for number, tokens in enumerate(batches):
        step = run(clustering, tokens.chunk(micro_batches))
        # Not yet anything, one batch, two; and after that the oldest is gone.
        earlier = torch.cat([tokens[:0], *batches[max(number - 2, 0) : number]])
        expected = slow(tokens, clustering.prototypes, clustering.bias, clustering.settings, earlier.bfloat16())
        assert_close(Results(step[0], step[1], *step[2]), expected, rtol=4e-5, atol=2e-6)
        clustering.follow()
    # Without the queue the targets would be others: the test could fail.
    assert (run(clustering_with(0, clustering.settings), [tokens])[1] - expected.assignments).abs().max() > 1e-2


@pytest.mark.parametrize("budget", [None, 8_000])
@pytest.mark.parametrize("sinkhorn", ["positionwise", "standard"])
def test__an_empty_queue_changes_no_bit(sinkhorn: Any, budget: int | None) -> None:
    settings, tokens = ClusteringSettings(sinkhorn=sinkhorn, chunk_bytes=budget), torch.randn(4, POSITIONS, WIDTH)
    without, empty = run(clustering_with(0, settings), [tokens]), run(clustering_with(3, settings), [tokens])
    for ours, theirs in zip((*without[:2], *without[2]), (*empty[:2], *empty[2]), strict=True):
        assert torch.equal(ours, theirs)


def test__only_followed_batches_enter_and_each_replaces_the_oldest() -> None:
    clustering = clustering_with(2)
    batches = [torch.randn(IMAGES, POSITIONS, WIDTH) for _ in range(4)]
    for tokens in batches:
        run(clustering, [tokens])
        # Of this one a loss was NaN.
        run(clustering, [torch.full_like(tokens, torch.nan)])
        run(clustering, [tokens])
        clustering.follow()
        # Once for each batch.
        clustering.follow()
    expected = torch.cat([batches[2], batches[3]]).bfloat16()
    assert torch.equal(clustering.queue.earlier(), expected)
    run(clustering, [batches[0]])
    clustering.follow()
    assert torch.equal(clustering.queue.earlier(), torch.cat([batches[0], batches[3]]).bfloat16())


@pytest.mark.parametrize("budget", [None, 16_000])
@pytest.mark.parametrize("sinkhorn", ["positionwise", "standard"])
def test__a_skipped_batch_leaves_nothing_to_be_balanced_with(sinkhorn: Any, budget: int | None) -> None:
    clustering = clustering_with(3, ClusteringSettings(sinkhorn=sinkhorn, chunk_bytes=budget))
    # As if one prototype were next to tokens of zeros.
    clustering.bias.data[0] = 5
    earlier: list[Tensor] = []
    for skipped in (True, False, True, False, False):
        tokens = torch.randn(IMAGES, POSITIONS, WIDTH)
        step = run(clustering, [tokens])
        together = torch.cat(earlier).bfloat16() if earlier else None
        expected = slow(tokens, clustering.prototypes, clustering.bias, clustering.settings, together)
        assert_close(Results(step[0], step[1], *step[2]), expected, rtol=4e-5, atol=2e-6)
        clustering.follow(torch.tensor(float(skipped)))
        earlier += [] if skipped else [tokens]


def test__without_a_queue_nothing_is_kept() -> None:
    clustering = clustering_with(0)
    run(clustering, [torch.randn(IMAGES, POSITIONS, WIDTH)])
    clustering.follow()
    assert clustering.queue is None
    assert clustering.sharded_buffers == {}
    assert [name for name, _ in clustering.named_buffers()] == ["recent_use"]


def test__the_queue_is_no_part_of_what_is_learnt() -> None:
    clustering = clustering_with(2)
    assert set(clustering.state_dict()) == {"prototypes", "bias"}
    assert [name for name, _ in clustering.named_buffers()] == ["recent_use", "queue.tokens", "queue.seen"]
    assert clustering.queue.tokens.numel() == 2 * IMAGES * POSITIONS * WIDTH
    assert clustering.queue.tokens.dtype == torch.bfloat16


def queue_of_process(batches: Sequence[Tensor], process: int, processes: int, micro_batches: int) -> TokenQueue:
    """What one process keeps of global batches, of which the loader gives it its share."""
    share = BatchShare(12, micro_batches, process, processes)
    queue = TokenQueue(QueueShape(2, 12 // processes, POSITIONS, micro_batches), WIDTH)
    for tokens in batches:
        queue.enter([tokens[share.samples(number)] for number in range(micro_batches)])
    return queue


@pytest.mark.parametrize(("processes", "micro_batches"), [(1, 1), (1, 3), (2, 1), (2, 2), (3, 2), (4, 3)])
def test__the_parts_of_all_processes_make_one_queue_whatever_their_number(processes: int, micro_batches: int) -> None:
    batches = [torch.randn(12, POSITIONS, WIDTH) for _ in range(3)]
    queues = [queue_of_process(batches, process, processes, micro_batches) for process in range(processes)]
    whole = whole_of_parts([queue.tokens for queue in queues], blocks=queues[0].blocks)
    assert torch.equal(whole, queue_of_process(batches, 0, 1, 1).tokens)
    assert torch.equal(whole, torch.cat([batches[2], batches[1]]).bfloat16())
    for process, queue in enumerate(queues):
        assert torch.equal(local_part(whole, blocks=queue.blocks, process=process, processes=processes), queue.tokens)


def test__sharded_buffers_are_named_with_their_blocks() -> None:
    clustering = clustering_with(3, micro_batches=2)
    ((name, blocks),) = clustering.sharded_buffers.items()
    assert blocks == 6
    assert dict(clustering.named_buffers())[name] is clustering.queue.tokens


@pytest.mark.parametrize("queued", [24, 72])
@pytest.mark.parametrize("sinkhorn", ["positionwise", "standard"])
def test__memory_stays_within_the_budget_with_a_queue(sinkhorn: Any, queued: int) -> None:
    images, positions, width, prototypes, budget = 8, 32, 64, 256, 500_000
    settings, weights = ClusteringSettings(sinkhorn=sinkhorn, chunk_bytes=budget), torch.randn(prototypes, width)
    tokens = torch.randn(images, positions, width)
    earlier = torch.randn(queued, positions, width).bfloat16()
    with PeakBytes(tokens, weights, earlier) as memory:
        cluster(tokens, weights, None, settings, OneProcess(), earlier)
    # The gradient and what rebuilds targets are beside the budget.
    groups = positions if sinkhorn == "positionwise" else 1
    outputs = prototypes * (width + 1 + 2 * groups) + (images + queued) * positions
    assert memory.peak - 4 * outputs <= budget
    # The queue's logits alone would be larger.
    assert queued * positions * prototypes * 4 > 1.5 * budget


def test__a_queue_sharpens_the_targets_of_a_batch_that_is_small_for_its_prototypes() -> None:
    """Of four images each must share all prototypes; with ninety-six more beside them they need not."""
    centers = torch.randn(PROTOTYPES, WIDTH)
    draws = centers[torch.randint(PROTOTYPES, (100, POSITIONS))]
    earlier, batch = (draws + 0.1 * torch.randn_like(draws)).split([96, 4])
    entropy = []
    for clustering in (clustering_with(0), clustering_with(24)):
        clustering.prototypes.data = centers.clone()
        if clustering.queue is not None:
            for part in earlier.split(4):
                clustering.queue.enter([part])
        entropy.append(torch.special.entr(run(clustering, [batch])[1]).sum(-1).mean())
    assert entropy[1] < 0.5 * entropy[0]


def test__a_queue_that_pretends_to_be_full_is_as_long_as_a_full_one() -> None:
    queue = TokenQueue(QueueShape(3, IMAGES, POSITIONS), WIDTH)
    assert queue.earlier() is None
    queue.pretend_full()
    assert queue.earlier().shape == (3 * IMAGES, POSITIONS, WIDTH)
    assert torch.isfinite(queue.earlier()).all()
    assert queue.earlier().float().std() > 0.5


def test__a_run_resumed_with_its_queue_continues_bit_for_bit(small_config: Config, tmp_path: Path) -> None:
    config, checkpoints = varied(small_config, "clustering.queue=12"), Checkpoints(tmp_path)
    learner, resumed = build_learner(config), build_learner(config)
    for step in range(3):
        train_step(learner, [batch_of(config, step)], step)
    checkpoints.save(learner, Position(step=3))
    checkpoints.load(resumed)
    assert resumed.target.queue.seen == 3
    assert torch.equal(resumed.target.queue.tokens, learner.target.queue.tokens)
    for each in (learner, resumed):
        torch.manual_seed(3)
        train_step(each, [batch_of(config, 3)], 3)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(states(learner), states(resumed), strict=True))
    assert torch.equal(resumed.target.queue.tokens, learner.target.queue.tokens)


def test__checkpoints_have_a_queue_exactly_where_the_run_has_one(small_config: Config, tmp_path: Path) -> None:
    """So that those of earlier formats, whose runs had none, are read as they were."""
    without, queued = build_learner(small_config), build_learner(varied(small_config, "clustering.queue=12"))
    assert tensors(queued).keys() - tensors(without).keys() == {"clustering.queue.tokens", "clustering.queue.seen"}
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(without, Position(step=1))
    assert checkpoints.load(build_learner(small_config)).step == 1
    with pytest.raises(CapiError, match=r'lacks "clustering\.queue\.'):
        checkpoints.load(queued)


def test__a_loss_that_is_not_finite_leaves_the_queue_alone(small_config: Config) -> None:
    config = varied(small_config, "clustering.queue=12")
    learner, batch = build_learner(config), batch_of(config)
    train_step(learner, [batch], 1)
    before = learner.target.queue.tokens.clone()
    metrics = train_step(learner, [batch._replace(images=batch.images * torch.nan)], 2)
    assert not torch.isfinite(metrics.student_loss)
    assert learner.target.queue.seen == 1
    assert torch.equal(learner.target.queue.tokens, before)


def test__the_shape_of_a_queue_follows_the_config(small_config: Config) -> None:
    assert build_networks(small_config).target.queue is None
    config = varied(small_config, "clustering.queue=18", "optimization.micro_batches=3")
    for processes, images in ((1, 6), (2, 3)):
        target = build_networks(config, processes=processes).target
        assert target.queue.shape == QueueShape(batches=3, images=images, positions=48, micro_batches=3)
