"""Shared by all tests: one thread for torch, so that arithmetic order (and this 2-core machine) is predictable."""

import torch

torch.set_num_threads(1)
