"""Quantization to 8 bits: the formats, the layers that are quantized, and QuantizeLinear/DequantizeLinear around them."""
