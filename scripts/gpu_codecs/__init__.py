"""Parts of scripts/bench_gpu_codecs.py."""
