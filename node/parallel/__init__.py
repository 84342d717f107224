"""One stage over several devices of a node: collectives of its own, through `torch.distributed`."""
