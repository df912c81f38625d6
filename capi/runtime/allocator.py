"""Keep freed memory in the process instead of handing it back to the kernel.

glibc maps every large block anew and unmaps it at free, so each training step pays page faults for the same
gigabytes again. Raising the two thresholds keeps the pages. Other C libraries are left alone.
"""

import ctypes
import platform

# From malloc.h; the values are C ints, so 2^31 - 1 is the largest trim threshold. Blocks above the mmap threshold still
# go back at once: no tensor of a step should be that large, and keeping such blocks would bloat the process.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_LARGEST_INT = 2**31 - 1
LARGEST_KEPT_BLOCK = 512 * 2**20


def keep_freed_memory(largest_block: int = LARGEST_KEPT_BLOCK) -> bool:
    """Raise glibc's mmap and trim thresholds. True when that was possible, False on other C libraries."""
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    trimmed = mallopt(_M_TRIM_THRESHOLD, _LARGEST_INT)
    # Some releases of glibc refuse more than 32 MiB.
    mapped = mallopt(_M_MMAP_THRESHOLD, largest_block) or mallopt(_M_MMAP_THRESHOLD, 32 * 2**20)
    return bool(trimmed and mapped)
