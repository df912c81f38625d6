"""CAPI models in the format of the transformers library."""
