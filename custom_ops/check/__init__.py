"""Comparison of GPU kernels with NumPy, which detects out-of-bounds writes."""
