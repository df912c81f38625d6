import numpy as np
import pytest

from capi.config.schema import Config
from capi.errors import CapiError
from capi.train.build import build_learner
from capi.train.schedules import Schedule
from tests.variants import varied


@pytest.mark.parametrize("warmup", [0, 1, 2, 10])
def test__warm_up_is_a_linspace_and_the_rest_a_cut_cosine(warmup: int) -> None:
    schedule = Schedule(total_steps=50, warmup_steps=warmup, cosine_kept=0.8)
    rates = [schedule.learning_rate(step, peak=3e-3) for step in range(50)]
    rest = 50 - warmup
    cosine = 3e-3 * 0.5 * (1 + np.cos(np.pi * 0.8 * np.arange(rest) / rest))
    np.testing.assert_allclose(rates, np.concatenate([np.linspace(0, 3e-3, warmup), cosine]), rtol=1e-12)


def test__the_cosine_never_reaches_its_end() -> None:
    schedule = Schedule(total_steps=1000, warmup_steps=100)
    final = schedule.learning_rate(999, peak=1.0)
    assert 0.5 * (1 + np.cos(np.pi * 0.8)) < final < 0.1


def test__momentum_starts_at_one_and_is_lowest_at_the_peak() -> None:
    schedule = Schedule(total_steps=100, warmup_steps=10)
    momenta = [schedule.teacher_momentum(step, peak=0.99) for step in range(100)]
    assert momenta[0] == 1
    assert min(momenta) == pytest.approx(0.99)
    assert momenta.index(min(momenta)) in (9, 10)


@pytest.mark.parametrize("schedule", [Schedule(total_steps=50, warmup_steps=5), Schedule(1, 0), Schedule(4, 4)])
def test__beyond_the_last_step_its_values_stay(schedule: Schedule) -> None:
    last = schedule.total_steps - 1
    for step in (last + 1, last + 20, 100 * (last + 1)):
        assert schedule.learning_rate(step, peak=1.0) == schedule.learning_rate(last, peak=1.0)
        assert schedule.teacher_momentum(step, peak=0.99) == schedule.teacher_momentum(last, peak=0.99)


def test__warmup_stable_decay_stays_at_its_peak_and_falls_in_a_line() -> None:
    schedule = Schedule(total_steps=50, warmup_steps=10, decay_steps=5)
    rates = [schedule.learning_rate(step, peak=3e-3) for step in range(50)]
    expected = np.concatenate([np.linspace(0, 3e-3, 10), np.full(35, 3e-3), np.linspace(3e-3, 0, 6)[:-1]])
    np.testing.assert_allclose(rates, expected, rtol=1e-9)


def test__a_config_chooses_the_schedule_and_refuses_settings_of_the_other(small_config: Config) -> None:
    stable = ["optimization.schedule=warmup_stable_decay", "optimization.decay_share=0.5"]
    rate = build_learner(varied(small_config, *stable)).learning_rate
    assert [rate(step) / rate(5) for step in (10, 11, 19)] == pytest.approx([1.0, 0.9, 0.1])
    for overrides, message in (
        (["optimization.decay_share=0.5"], r"decay_share has no meaning with optimization\.schedule=cosine"),
        ([*stable, "optimization.cosine_kept=1.0"], r"cosine_kept has no meaning with .*=warmup_stable_decay"),
        ([*stable, "optimization.warmup_share=0.6"], r"are more than the whole run: lower one"),
    ):
        with pytest.raises(CapiError, match=message):
            varied(small_config, *overrides)
