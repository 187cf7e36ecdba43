"""Lowering passes for individual targets, such as layout and packing. Each target selects its own."""
