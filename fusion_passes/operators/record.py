"""Domains of fused operators."""

DOMAIN = "sd_ort"
