"""Lowerings: what one target wants otherwise than the others, such as its layout; each target picks its own."""
