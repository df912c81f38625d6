"""What frozen features are good for."""
