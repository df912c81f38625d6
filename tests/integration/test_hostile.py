"""Whatever a stranger gives: an answer in one sentence, soon, in bounded memory, and nothing is touched outside."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.integration.hostile.running import CPU_SECONDS, GROUPS, Answer, cases_of

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits of memory and forks as Linux has them")


@pytest.mark.parametrize(
    ("groups", "every"), [(GROUPS, 6), *(pytest.param([group], 1, marks=pytest.mark.thorough) for group in GROUPS)]
)
def test__every_hostile_case_is_answered_in_one_sentence(groups: Sequence[str], every: int, tmp_path: Path) -> None:
    """A sixth of the cases of all groups; all of each where there is time."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.integration.hostile", ",".join(groups), str(tmp_path / "base"), str(every)],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
        check=False,
    )
    answers = [Answer(**json.loads(line)) for line in done.stdout.splitlines()]
    assert len(answers) == len(cases_of(groups)[::every]), done.stderr[-3000:]
    bad = {answer.name: faults for answer in answers if (faults := complaints(answer))}
    assert not bad, json.dumps(bad, indent=1)


def complaints(answer: Answer) -> list[str]:
    """What is wrong with an answer."""
    said = answer.out + answer.err
    sentences = [line for line in answer.err.splitlines() if line.startswith("Error: ")]
    wrong = {
        f"code {answer.code}, expected one of {answer.codes}": answer.code not in answer.codes,
        "a traceback": "Traceback" in said,
        f"{len(sentences)} sentences": answer.code == 2 and len(sentences) != 1,
        "an escape sequence": any(sign in said for sign in ("\x1b", "\u202e", "\x9b")),
        "memory ran out": "memory is full" in said or "out of memory" in said,
        f"{answer.cpu} seconds": answer.cpu > CPU_SECONDS,
        f"outside: {answer.changed}": bool(answer.changed),
    }
    faults = [reason for reason, is_so in wrong.items() if is_so]
    return [*faults, said[-1500:]] if faults else []


def test__there_are_some_hundred_cases_and_always_the_same() -> None:
    names = [case.name for case in cases_of(GROUPS)]
    assert len(names) >= 300
    assert names == [case.name for case in cases_of(GROUPS)]
