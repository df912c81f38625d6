"""The command line, in which files of process 1 cannot grow once a checkpoint is there: `full_disk.py ARGUMENTS`."""

import os
import resource
import signal
from typing import Any

from capi.cli import main
from capi.train.checkpoint import Checkpoints

if __name__ == "__main__":
    begin = Checkpoints._begin

    def limited(self: Checkpoints, *arguments: Any) -> Any:
        if os.environ["RANK"] == "1" and self.steps():
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (2000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        return begin(self, *arguments)

    Checkpoints._begin = limited  # type: ignore[method-assign]
    main()
