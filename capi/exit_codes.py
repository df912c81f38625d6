"""What commands end with beside 0, done; 1, done with something amiss; and 2, bad input."""

# The code of a temporary failure in sysexits.h: saved because the machine was needed, to be started again.
PREEMPTED = 75
# Someone pressed Ctrl-C: 128 and the number of the signal, as shells have it.
INTERRUPTED = 130
