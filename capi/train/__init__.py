"""One iteration, the optimisers and the schedules."""
