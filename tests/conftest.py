"""Shared by all tests: one thread for torch, so that arithmetic order is predictable on few cores."""

import torch
from hypothesis import settings

torch.set_num_threads(1)

# A busy machine is slow at times: how long a test may take is pytest-timeout's to say.
settings.register_profile("thinwire", deadline=None)
settings.load_profile("thinwire")
