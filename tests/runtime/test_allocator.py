import platform
import subprocess
import sys

import pytest

import capi.runtime.devices
from capi.runtime.devices import keep_freed_memory

FAULTS = """
import resource, torch
from capi.runtime.devices import keep_freed_memory
{call}
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(16 * 2**20)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
# The heap settles after some ten rounds.
for _ in range(30):
    faults()
print(sum(faults() for _ in range(10)))
"""


@pytest.mark.thorough
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has these thresholds")
def test__a_large_tensor_is_not_paged_in_again() -> None:
    counts = []
    for call in ("", "assert keep_freed_memory()"):
        output = subprocess.run(
            [sys.executable, "-c", FAULTS.format(call=call)], capture_output=True, text=True, check=True
        )
        counts.append(int(output.stdout))
    default, with_setting = counts
    assert default > 100
    assert with_setting < default / 10


def test__other_c_libraries_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "libc_ver", lambda: ("", ""))
    monkeypatch.setattr(capi.runtime.devices.ctypes, "CDLL", lambda _: pytest.fail("must not be called"))
    assert keep_freed_memory() is False
