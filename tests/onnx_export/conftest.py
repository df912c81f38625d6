import jaxtyping
import pytest


@pytest.fixture
def sizes_are_symbols(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tracing puts symbols in place of sizes, which the enforced annotations do not take for numbers."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
