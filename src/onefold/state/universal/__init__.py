"""Universal: DeepSpeed's universal checkpoints, seen as an index and a reader of tensors."""
