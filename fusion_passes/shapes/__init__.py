"""Shapes in symbols: every size a polynomial over the names of sizes, so that equal sizes compare equal."""
