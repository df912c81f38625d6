"""The pages about a run."""
