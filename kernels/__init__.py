"""Tensor arithmetic: pure functions without network access. Every kernel has a torch reference."""
