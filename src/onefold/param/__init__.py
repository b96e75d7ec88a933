"""Parameters: stations 0 and 6 (unshard, publish)."""
