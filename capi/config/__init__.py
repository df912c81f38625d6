"""Every knob of a run, typed and documented, and the recipes that set them."""
