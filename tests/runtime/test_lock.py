import subprocess
import sys
from pathlib import Path

import pytest

from capi.errors import CapiError
from capi.runtime.lock import is_being_trained
from capi.zoo.run_folder import RunFolder

pytestmark = pytest.mark.skipif(sys.platform not in {"linux", "darwin"}, reason="this system cannot tell")
# Takes the lock of a run as training does, without importing torch.
_HOLDER = """
import fcntl, sys
file = open(sys.argv[1], "a")
fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
print("held", flush=True)
sys.stdin.read()
"""


def test__a_run_is_being_trained_while_another_process_holds_its_lock(tmp_path: Path) -> None:
    assert is_being_trained(tmp_path) is False
    with subprocess.Popen(
        [sys.executable, "-c", _HOLDER, str(tmp_path / ".lock")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout
        assert process.stdout.readline() == "held\n"
        assert is_being_trained(tmp_path) is True
        process.communicate("")
    assert is_being_trained(tmp_path) is False


def test__asking_does_not_make_the_asker_lose_its_own_lock(tmp_path: Path) -> None:
    taker = "import sys; from pathlib import Path\n" + _HOLDER.replace("sys.stdin.read()", "")
    with RunFolder(tmp_path).locked():
        is_being_trained(tmp_path)
        other = subprocess.run([sys.executable, "-c", taker, str(tmp_path / ".lock")], capture_output=True, check=False)
    assert other.returncode != 0, "another process could take the lock"


def test__asking_does_not_keep_a_run_from_starting(tmp_path: Path) -> None:
    (tmp_path / ".lock").touch()
    is_being_trained(tmp_path)
    try:
        with RunFolder(tmp_path).locked():
            pass
    except CapiError as error:
        pytest.fail(str(error))
