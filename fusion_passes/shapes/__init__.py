"""Symbolic shape inference. Every size is a polynomial over named sizes, so equal sizes compare equal."""
