"""A finished study and a run to share."""

from tests.api.run_fixtures import run, trained  # noqa: F401
from tests.api.study_fixtures import data, done  # noqa: F401
