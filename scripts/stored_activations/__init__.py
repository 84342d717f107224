"""Parts of scripts/bench_stored_activations.py."""
