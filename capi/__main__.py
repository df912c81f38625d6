"""`python -m capi` is the command line."""

from capi.cli import main

main()
