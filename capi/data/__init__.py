"""Where images come from: folders, built-in photos, decoding, crops, and a loader that any step can be asked of."""
