"""The blocks that are checked and measured."""

import torch
from torch import nn

from node.config.schema import ModelSection
from node.model.blocks import Gpt2Block, LlamaBlock, Rotary
from node.model.storage import Storage
from node.model.tensor_rank import TensorRank


def random_block(model: ModelSection, storage: Storage) -> nn.Module:
    """A block with random weights drawn on the GPU: what is measured does not depend on them."""
    device = torch.device("cuda")
    block: nn.Module
    if model.family == "gpt2":
        with torch.device("cuda"):
            block = Gpt2Block(model, storage, TensorRank())
    else:
        rotary = Rotary(model.sequence, model.hidden // model.heads, model.rope_theta, device)
        with torch.device("cuda"):
            block = LlamaBlock(model, rotary, storage, TensorRank())
    generator = torch.Generator(device="cuda").manual_seed(0)
    with torch.no_grad():
        for parameter in block.parameters():
            if parameter.ndim > 1:
                parameter.data = (
                    0.02 * torch.randn(parameter.shape, generator=generator, device="cuda")
                ).bfloat16()
            else:
                parameter.fill_(1.0)
            parameter.grad = None
    return block
