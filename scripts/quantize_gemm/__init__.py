"""Quantizing inside a matrix product, measured by scripts/bench_quantize_gemm.py."""
