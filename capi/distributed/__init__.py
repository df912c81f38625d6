"""Process groups and what is computed across them. Knows torch.distributed, knows nothing of CAPI."""
