import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from capi.errors import CapiError
from capi.evals.fitted_probes import AttentiveClassifier, LinearClassifier
from capi.evals.logistic import LogisticRegression
from capi.evals.probes import (
    PAPER_GRID,
    AttentiveProbes,
    Judged,
    LinearProbes,
    Probes,
    ProbeSchedule,
    ProbeSetting,
    ProbeTrainer,
    best_setting,
    judged,
    loss_sums,
    probe_logits,
    train_probes,
)
from tests.evals.plain_probes import (
    CLASSES,
    IMAGES,
    KINDS,
    SCHEDULE,
    SETTINGS,
    TOKENS,
    WIDTH,
    OtherProcess,
    WithOther,
    assert_close_states,
    batches,
    new_probes,
    new_trainer,
    same_bits,
    trained,
    trained_plainly,
)


def test__the_grid_is_that_of_the_paper() -> None:
    assert len(set(PAPER_GRID)) == 30
    assert {setting.weight_decay for setting in PAPER_GRID} == {5e-4, 1e-3, 5e-2}
    assert sorted({setting.learning_rate for setting in PAPER_GRID})[::3] == [1e-5, 1e-4, 1e-3, 1e-2]


def test__the_rate_rises_to_its_peak_and_falls_to_zero() -> None:
    schedule = ProbeSchedule()
    rates = [schedule.learning_rate(step, peak=1e-3) for step in range(12500)]
    peak = 1e-3 * 1024 / 256
    assert rates[0] == pytest.approx(peak / 1250)
    assert rates[624] == pytest.approx(peak / 2)
    assert rates[1249] == rates[1250] == pytest.approx(peak)
    assert rates[1250 + 11250 // 2] == pytest.approx(peak / 2)
    assert rates[1250 + 11250 // 3] == pytest.approx(peak * 3 / 4)
    assert 0 < rates[-1] < peak * 1e-7
    assert schedule.learning_rate(12500, peak=1e-3) == schedule.learning_rate(20000, peak=1e-3) == 0
    assert rates[:1250] == sorted(rates[:1250])
    assert rates[1250:] == sorted(rates[1250:], reverse=True)


@pytest.mark.parametrize("warmup", [0, 1, 4])
def test__a_schedule_may_have_no_warm_up_or_nothing_else(warmup: int) -> None:
    rates = [ProbeSchedule(4, warmup, 256).learning_rate(step, peak=1.0) for step in range(4)]
    assert max(rates) == 1
    assert min(rates) > 0


@pytest.mark.parametrize(
    ("numbers", "message"),
    [((10, 11, 4), "warm-up of 11 steps .* 10"), ((0, 0, 4), "got 0 steps"), ((5, 0, 0), "of 0 images")],
)
def test__an_impossible_schedule_is_an_error(numbers: tuple[int, int, int], message: str) -> None:
    with pytest.raises(CapiError, match=message):
        ProbeSchedule(*numbers)


@pytest.mark.parametrize("kind", KINDS)
def test__settings_train_as_plain_heads_do_one_by_one(kind: type[Probes]) -> None:
    trainer = new_trainer(kind)
    before = copy.deepcopy(trainer.probes.state_dict())
    losses = trained(trainer)
    for index, setting in enumerate(SETTINGS):
        plain, expected = trained_plainly(kind, setting)
        torch.testing.assert_close(losses[:, index], torch.tensor(expected), rtol=1e-5, atol=1e-5)
        for name, value in trainer.probes.state_dict().items():
            # In plain attention rounding errors push this bias about, but it has no say.
            if name != "key.bias":
                torch.testing.assert_close(value[index], plain.state_dict()[name], rtol=1e-5, atol=1e-5)
                assert not torch.allclose(value[index], before[name][index], atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test__one_mean_over_many_heads_is_felt_through_eps_alone(kind: type[Probes]) -> None:
    # So many that eps is as large as the gradients.
    trainer = new_trainer(kind, heads_in_mean=10**6)
    trained(trainer)
    for index, setting in enumerate(SETTINGS):
        plain, _ = trained_plainly(kind, setting, heads_in_mean=10**6)
        separate, _ = trained_plainly(kind, setting)
        for name, value in trainer.probes.state_dict().items():
            if name != "key.bias":
                torch.testing.assert_close(value[index], plain.state_dict()[name], rtol=1e-5, atol=1e-6)
                assert not torch.allclose(value[index], separate.state_dict()[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test__a_setting_does_not_depend_on_the_others(kind: type[Probes]) -> None:
    together, alone = new_trainer(kind), new_trainer(kind, SETTINGS[1:2])
    torch.testing.assert_close(trained(together)[:, 1:2], trained(alone), rtol=1e-5, atol=1e-5)
    assert_close_states(together.probes.select(1), alone.probes)


@pytest.mark.parametrize("kind", KINDS)
def test__training_twice_gives_the_same_bits(kind: type[Probes]) -> None:
    first, second = new_trainer(kind), new_trainer(kind)
    assert torch.equal(trained(first), trained(second))
    assert same_bits(first.probes, second.probes)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", [[6, 6], [1, 11], [5, 3, 4], [0, 12]])
def test__parts_of_a_batch_equal_the_whole(kind: type[Probes], sizes: list[int]) -> None:
    whole, divided = new_trainer(kind), new_trainer(kind)
    for number, (inputs, labels) in enumerate(batches(kind, 4)):
        parts = zip(inputs.split(sizes), labels.split(sizes), strict=True)
        torch.testing.assert_close(divided.step(parts, number), whole.step([(inputs, labels)], number))
    assert_close_states(divided.probes, whole.probes)


@pytest.mark.parametrize("images", [3, 20])
def test__a_batch_of_another_size_than_planned_still_counts_by_its_mean(images: int) -> None:
    vectors, labels = torch.randn(images, WIDTH), torch.randint(CLASSES, (images,))
    gradients = []
    for planned in (IMAGES, images):
        probes = new_probes(LinearProbes)
        trainer = ProbeTrainer(probes, SETTINGS, ProbeSchedule(8, 3, planned))
        trainer.accumulate(vectors, labels)
        losses = trainer._finished_batch(0)
        gradients.append(probes.classifier.weight.grad.clone())
        torch.testing.assert_close(losses, loss_sums(probes(vectors), labels) / images)
    assert gradients[0].abs().max() > 1e-3
    torch.testing.assert_close(gradients[0], gradients[1])


@pytest.mark.parametrize("kind", KINDS)
def test__processes_that_share_a_batch_take_the_step_of_the_whole(kind: type[Probes]) -> None:
    ((inputs, labels),) = batches(kind, 1)
    whole, other = new_trainer(kind), OtherProcess()
    first, second = zip(inputs.split([5, 7]), labels.split([5, 7]), strict=True)
    new_trainer(kind, reduction=other).step([first], 0)
    shared = new_trainer(kind, reduction=WithOther(other))
    torch.testing.assert_close(shared.step([second], 0), whole.step([(inputs, labels)], 0))
    assert_close_states(shared.probes, whole.probes)


def test__weights_shrink_without_a_gradient_and_biases_do_not() -> None:
    # One class: the loss and all gradients are 0, so decay is all there is.
    probes = AttentiveProbes(settings=2, width=WIDTH, classes=1)
    with torch.no_grad():
        for parameter in probes.parameters():
            parameter.fill_(1.0)
    schedule = ProbeSchedule(total_steps=4, warmup_steps=1, batch_size=256)
    trainer = ProbeTrainer(probes, (ProbeSetting(0.1, 0.5), ProbeSetting(0.2, 0.0)), schedule)
    trainer.step([(torch.randn(4, TOKENS, WIDTH), torch.zeros(4, dtype=torch.long))], 0)
    for name, value in probes.state_dict().items():
        assert (value[1] == 1).all()
        torch.testing.assert_close(value[0], torch.full_like(value[0], 1.0 if name.endswith("bias") else 0.95))


@pytest.mark.parametrize("kind", KINDS)
def test__a_setting_that_diverges_leaves_the_others_bit_identical(kind: type[Probes]) -> None:
    wild = (SETTINGS[0], ProbeSetting(1e38, 0.0), SETTINGS[2])
    trainer, calm = new_trainer(kind, wild), new_trainer(kind)
    losses, expected = trained(trainer), trained(calm)
    assert trainer.failed_.tolist() == [False, True, False]
    assert losses[0].isfinite().all()
    assert losses[-1, 1].isnan()
    assert torch.equal(losses[:, ::2], expected[:, ::2])
    assert all(same_bits(trainer.probes.select(index), calm.probes.select(index)) for index in (0, 2))
    assert all(value.isnan().all() for value in trainer.probes.select(1).state_dict().values())


def test__a_setting_stays_failed_once_its_loss_was_infinite() -> None:
    trainer = new_trainer(LinearProbes)
    with torch.no_grad():
        trainer.probes.classifier.bias[1, 0] = 3e38
        trainer.probes.classifier.bias[1, 1:] = -3e38
    vectors, labels = torch.randn(IMAGES, WIDTH), torch.ones(IMAGES, dtype=torch.long)
    losses = [trainer.step([(vectors, labels)], number) for number in range(2)]
    for each in losses:
        assert each.isnan().tolist() == [False, True, False]
    ((scores, _),) = judged({"linear": trainer.probes}, [({"linear": vectors}, labels)]).values()
    assert scores.isnan().tolist() == [False, True, False]


def test__when_every_setting_fails_that_is_an_error() -> None:
    trainer = new_trainer(LinearProbes)
    vectors, labels = next(batches(LinearProbes, 1))
    trainer.step([(vectors, labels)], 0)
    vectors[3, 2] = torch.nan
    with pytest.raises(CapiError, match=r"at step 1 no setting is left .* \(3 were tried\)"):
        trainer.step([(vectors, labels)], 1)


@pytest.mark.parametrize("kind", KINDS)
def test__features_made_in_inference_mode_can_be_learnt_from(kind: type[Probes]) -> None:
    plain, inference = new_trainer(kind), new_trainer(kind)
    ((inputs, labels),) = batches(kind, 1)
    with torch.inference_mode():
        copied = inputs.clone()
    assert torch.equal(inference.step([(copied, labels)], 0), plain.step([(inputs, labels)], 0))
    assert same_bits(inference.probes, plain.probes)


def test__learning_works_where_gradients_are_off() -> None:
    trainer, expected = new_trainer(LinearProbes), new_trainer(LinearProbes)
    ((inputs, labels),) = batches(LinearProbes, 1)
    with torch.no_grad():
        trainer.step([(inputs, labels)], 0)
    expected.step([(inputs, labels)], 0)
    assert same_bits(trainer.probes, expected.probes)


@pytest.mark.parametrize("kind", KINDS)
def test__features_of_half_precision_give_whole_logits(kind: type[Probes]) -> None:
    ((inputs, _),) = batches(kind, 1)
    probes = new_trainer(kind).probes
    assert torch.equal(probe_logits(probes, inputs.bfloat16()), probe_logits(probes, inputs.bfloat16().float()))


@pytest.mark.parametrize("label", [-100, -1, CLASSES])
def test__labels_out_of_range_are_an_error(label: int) -> None:
    labels = torch.zeros(IMAGES, dtype=torch.long)
    labels[4] = label
    with pytest.raises(CapiError, match="between 0 and 4"):
        new_trainer(LinearProbes).accumulate(torch.randn(IMAGES, WIDTH), labels)


def test__a_step_without_images_and_a_wrong_number_of_settings_are_errors() -> None:
    with pytest.raises(CapiError, match="step 4 has no images"):
        new_trainer(LinearProbes).step([], 4)
    with pytest.raises(CapiError, match="have 3 settings, but 2"):
        ProbeTrainer(new_probes(LinearProbes), SETTINGS[:2], SCHEDULE)


def test__one_pass_trains_several_kinds_of_probes() -> None:
    data = [(torch.randn(IMAGES, TOKENS, WIDTH), torch.randint(CLASSES, (IMAGES,))) for _ in range(8)]
    asked = []

    def parts_of(number: int) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        asked.append(number)
        for tokens, labels in zip(data[number][0].split(5), data[number][1].split(5), strict=True):
            yield {"attentive": tokens, "mean": tokens.mean(1)}, labels

    together = {"attentive": new_trainer(AttentiveProbes), "mean": new_trainer(LinearProbes)}
    progress = []
    train_probes(together, (parts_of(number) for number in range(8)), on_step=lambda *seen: progress.append(seen))
    assert asked == [number for number, _ in progress] == list(range(8))
    apart = {"attentive": new_trainer(AttentiveProbes), "mean": new_trainer(LinearProbes)}
    for number, (tokens, labels) in enumerate(data):
        for name, inputs in (("attentive", tokens), ("mean", tokens.mean(1))):
            losses = apart[name].step([(inputs, labels)], number)
            torch.testing.assert_close(progress[number][1][name], losses, rtol=1e-5, atol=1e-5)
    for name, trainer in together.items():
        assert_close_states(trainer.probes, apart[name].probes)


def test__data_that_ends_early_is_an_error_and_more_data_is_left() -> None:
    def stream(count: int) -> Iterator[list[tuple[dict[str, Tensor], Tensor]]]:
        return ([({"linear": inputs}, labels)] for inputs, labels in batches(LinearProbes, count))

    with pytest.raises(CapiError, match="after 5 of 8 steps"):
        train_probes({"linear": new_trainer(LinearProbes)}, stream(5))
    endless = stream(10)
    train_probes({"linear": new_trainer(LinearProbes)}, endless)
    assert len(list(endless)) == 2


def test__schedules_of_different_lengths_do_not_share_a_pass() -> None:
    other = ProbeTrainer(new_probes(LinearProbes), SETTINGS, ProbeSchedule(9, 3, IMAGES))
    with pytest.raises(CapiError, match=r"\[8, 9\]"):
        train_probes({"one": new_trainer(LinearProbes), "other": other}, [])


def test__accuracy_is_the_share_of_right_answers_over_all_parts() -> None:
    probes = {"tokens": new_probes(AttentiveProbes), "vectors": new_probes(LinearProbes)}
    with torch.no_grad():
        for each in probes.values():
            for parameter in each.parameters():
                parameter.add_(torch.randn_like(parameter))
    tokens, labels = torch.randn(40, TOKENS, WIDTH), torch.randint(CLASSES, (40,))
    pieces = zip(tokens.split(17), labels.split(17), strict=True)
    scores = judged(probes, [({"tokens": x, "vectors": x[:, 0]}, y) for x, y in pieces])
    for name, inputs in (("tokens", tokens), ("vectors", tokens[:, 0])):
        expected = [(head.argmax(1) == labels).float().mean().item() for head in probes[name](inputs)]
        assert len(set(expected)) > 1
        assert scores[name].accuracy.tolist() == pytest.approx(expected)
        losses = [torch.nn.functional.cross_entropy(head, labels).item() for head in probes[name](inputs)]
        assert scores[name].loss.tolist() == pytest.approx(losses)


def test__equal_logits_choose_the_lowest_class() -> None:
    probes = LinearProbes(settings=1, width=WIDTH, classes=CLASSES)
    with torch.no_grad():
        probes.classifier.weight.zero_()
        probes.classifier.bias.copy_(torch.tensor([[0.0, 1.0, 1.0, 0.0, 1.0]]))
    for label, expected in ((1, 1.0), (2, 0.0), (4, 0.0)):
        part = {"linear": torch.randn(6, WIDTH)}, torch.full((6,), label)
        assert judged({"linear": probes}, [part])["linear"].accuracy.tolist() == [expected]


def test__a_setting_with_values_that_are_not_finite_has_no_accuracy() -> None:
    probes = new_probes(LinearProbes)
    with torch.no_grad():
        probes.classifier.weight[2, 4, 1] = torch.nan
    parts = [({"linear": inputs}, labels) for inputs, labels in batches(LinearProbes, 2)]
    assert judged({"linear": probes}, parts)["linear"].accuracy.isnan().tolist() == [False, False, True]


def test__scoring_no_images_is_an_error() -> None:
    with pytest.raises(CapiError, match="no images to score"):
        judged({"linear": new_probes(LinearProbes)}, [])


def test__the_best_setting_is_the_most_accurate_then_that_of_the_lowest_loss_then_the_first() -> None:
    nan = torch.nan
    assert best_setting(Judged(torch.tensor([nan, 0.2, 0.7, nan, 0.7]), torch.tensor([nan, 0.1, 2.0, nan, 2.0]))) == 2
    assert best_setting(Judged(torch.tensor([0.7, 0.2, 0.7]), torch.tensor([2.0, 0.1, 1.5]))) == 2
    assert best_setting(Judged(torch.tensor([nan, 0.0]), torch.tensor([nan, 5.0]))) == 1
    with pytest.raises(CapiError, match="none of the 2 settings"):
        best_setting(Judged(torch.tensor([torch.nan] * 2), torch.tensor([torch.nan] * 2)))


class Products(TorchDispatchMode):
    """How float32 products are computed while each one runs."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function._overloadpacket in {
            torch.ops.aten.mm,
            torch.ops.aten.addmm,
            torch.ops.aten.bmm,
            torch.ops.aten.baddbmm,
        }:
            self.seen.append(torch.get_float32_matmul_precision())
        return function(*args, **(kwargs or {}))


@pytest.fixture
def rounded_products() -> Iterator[None]:
    """What a user may have set for the whole program."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    yield
    assert torch.get_float32_matmul_precision() == "high"
    torch.set_float32_matmul_precision(before)


@pytest.mark.usefixtures("rounded_products")
def test__probes_are_trained_fitted_and_asked_in_true_float32() -> None:
    features, labels = torch.randn(12, 8), torch.arange(12) % 3
    settings, schedule = [ProbeSetting(1e-3, 0.0)], ProbeSchedule(total_steps=1, warmup_steps=0, batch_size=12)
    linear = LinearProbes(settings=1, width=8, classes=3)
    attentive = AttentiveProbes(settings=1, width=8, classes=3)

    def train() -> None:
        for probes, inputs in ((linear, features), (attentive, features[:, None])):
            ProbeTrainer(probes, settings, schedule).step([(inputs, labels)], 0)

    def ask() -> None:
        LinearClassifier.of(linear, "pooled").judge(features)
        AttentiveClassifier.of(attentive).judge(features[:, None])

    logistic = LogisticRegression()
    for work in (
        train,
        lambda: judged({"linear": linear}, [({"linear": features}, labels)]),
        ask,
        lambda: logistic.fit(features, labels),
        lambda: logistic.predict(features),
    ):
        with Products() as products:
            work()
        assert set(products.seen) == {"highest"}
