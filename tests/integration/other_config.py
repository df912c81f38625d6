"""The command line, with another value in process 1: OTHER=KEY=VALUE,KEY=VALUE `other_config.py ARGUMENTS`."""

import os
import sys

from capi.cli import main

if __name__ == "__main__":
    sys.argv.append(os.environ["OTHER"].split(",")[int(os.environ["RANK"])])
    main()
