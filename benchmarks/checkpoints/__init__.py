"""Checkpoints: saving and loading, onefold side by side with DCP and DeepSpeed."""
