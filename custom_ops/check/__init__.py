"""Kernels against NumPy: every candidate on every case, out-of-bounds writes seen."""
