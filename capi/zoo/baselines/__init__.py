"""Other people's encoders behind `VisionEncoder`: one plain vision transformer, and a small map of names per source."""
