"""The optimizer: stations 4 and 5 (norm and clip, step)."""
