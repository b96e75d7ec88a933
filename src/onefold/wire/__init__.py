"""The wire: the only folder that names ``torch.distributed``."""
