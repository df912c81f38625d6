"""Seeing what a run did: its health, its report, the pages that follow it, and the explorer."""
