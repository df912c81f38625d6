"""Hostile command lines, images, run folders and weights, made with a fixed seed, and how each was answered."""
