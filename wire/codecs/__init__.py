"""Codecs: pack a tensor into a known number of bytes, and unpack it. `registry.codec` finds one by name."""
