"""Subclasses of diffusers' modules that call the sd_ort operators. `optimize` assigns them to `__class__` of a module.

A subclass changes nothing but `forward`: parameters, names, hooks, the state dict and peft's layers stay.
`unsupported_reason(module)` of each file returns why a module cannot be replaced, or None.
"""
