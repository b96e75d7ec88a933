"""Checkpoints: what an engine is, on disk; see docs/design/checkpoints.md."""
