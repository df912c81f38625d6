"""Models that were published: what there is, and how their files come to this machine. Needs torch and nothing else."""
