"""The command line, with another seed in process 1: `other_config.py ARGUMENTS`."""

import os
import sys

from capi.cli import main

if __name__ == "__main__":
    sys.argv.append(f"seed={os.environ['RANK']}")
    main()
