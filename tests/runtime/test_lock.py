import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from capi.errors import CapiError
from capi.runtime.lock import is_being_trained, locked
from capi.zoo.run_folder import RunFolder

pytestmark = pytest.mark.skipif(sys.platform not in {"linux", "darwin"}, reason="this system cannot tell")
# Takes the lock of a run as training does, without importing torch.
_HOLDER = """
import fcntl, sys
file = open(sys.argv[1], "a")
fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
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
    done = threading.Event()

    def ask() -> None:
        while not done.wait(0.001):
            is_being_trained(tmp_path)

    asker = threading.Thread(target=ask)
    asker.start()
    try:
        for _ in range(20):
            with RunFolder(tmp_path).locked():
                assert is_being_trained(tmp_path) is True
    finally:
        done.set()
        asker.join()


def test__asking_creates_nothing_and_follows_no_link(tmp_path: Path) -> None:
    assert is_being_trained(tmp_path) is False
    assert list(tmp_path.iterdir()) == []
    (tmp_path / ".lock").symlink_to(tmp_path / "elsewhere")
    assert is_being_trained(tmp_path) is None


def test__a_process_that_is_forked_does_not_hold_the_lock(tmp_path: Path) -> None:
    with locked(tmp_path / ".lock", busy="busy"):
        child = os.fork()
        if child == 0:
            time.sleep(60)
            os._exit(0)
    try:
        with locked(tmp_path / ".lock", busy="busy"):
            pass
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test__a_lock_that_is_no_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / ".lock")
    with pytest.raises(CapiError, match="is no regular file"), locked(tmp_path / ".lock", busy="busy"):
        pass


def test__the_file_that_is_locked_keeps_its_contents(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text("{}")
    with locked(tmp_path / "plan.json"):
        assert (tmp_path / "plan.json").read_text() == "{}"
    assert (tmp_path / "plan.json").read_text() == "{}"
