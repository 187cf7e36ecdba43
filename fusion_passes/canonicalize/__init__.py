"""Exporter spellings to one spelling."""
