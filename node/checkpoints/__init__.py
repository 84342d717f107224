"""Hugging Face checkpoints: read them by byte ranges, start runs from them, export runs as them."""
