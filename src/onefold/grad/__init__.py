"""Gradients: stations 1 to 3 of their way (ready, keep or reduce, reduce)."""
