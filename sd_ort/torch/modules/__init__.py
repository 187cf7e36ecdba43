"""Modules of diffusers with our operators inside: subclasses that `optimize` puts in the place of a module's class.

A subclass adds nothing to a module but another `forward`: parameters, names, hooks and the state dict stay, and so does
what peft puts around a layer. `refuse(module)` of each file says why a module cannot take it, or None.
"""
