"""Fused operators: what each one means."""
