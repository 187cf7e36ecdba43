"""Quantization to 8 bits: formats, layers, and QuantizeLinear and DequantizeLinear around them."""
