"""A trained model for others: a folder with weights, config and model card, and the way to the Hub."""
