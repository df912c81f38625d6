"""One small map of names for each source, with where its facts come from."""
