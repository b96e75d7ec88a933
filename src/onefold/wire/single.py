"""The two collectives between one buffer and its slices, under the names that this torch has.

torch 2.13 renamed them and warns about the older names.
"""

import torch.distributed as dist

reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
