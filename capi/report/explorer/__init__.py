"""The page on which a person looks into a model."""
