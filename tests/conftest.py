"""Shared by all tests: one thread for torch, so that arithmetic order is predictable on few cores."""

import torch

torch.set_num_threads(1)
