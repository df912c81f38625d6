"""Features as pictures."""
