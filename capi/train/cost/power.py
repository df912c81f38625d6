"""What energy is counted with, in plans before a run and in reports after it: power of boards, CO2 of a kWh."""

import re
from functools import cache
from importlib import resources

import yaml

# kgCO2eq a kWh: the world's electricity in 2023, 480 g (Ember, Global Electricity Review 2024). The paper's 928 kg for
# 2651 kWh are 0.35, those of one data centre.
CARBON_INTENSITY = 0.48


def board_power(name: str) -> float | None:
    """Watts of a device by its maker's name for it; None where that is not known."""
    words = _words(name)
    return next((watts for known, watts in _boards() if known <= words), None)


def _words(name: str) -> set[str]:
    return set(re.findall(r"[A-Z0-9]+", name.upper()))


@cache
def _boards() -> list[tuple[set[str], float]]:
    text = (resources.files("capi.train.cost") / "board_power.yaml").read_text(encoding="utf-8")
    return [(_words(name), float(watts)) for name, watts in yaml.safe_load(text).items()]
