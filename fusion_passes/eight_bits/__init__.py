"""Quantization to 8 bits: layers, and QuantizeLinear and DequantizeLinear around them."""
