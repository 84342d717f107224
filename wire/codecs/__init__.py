"""Codecs: a tensor into bytes whose number is known beforehand, and back. `registry.codec` finds one by name."""
