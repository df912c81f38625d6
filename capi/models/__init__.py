"""The networks, written for one device. Nothing here imports more than torch."""
