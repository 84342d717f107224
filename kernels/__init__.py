"""Tensor arithmetic: pure functions that know no network. A torch reference stands beside every kernel."""
