"""Evaluation as a user meets it: models by name, benchmarks by name, results on disk."""
