"""Codecs: a tensor into bytes of known number, and back. `registry.codec` finds one by name."""
