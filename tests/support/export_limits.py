"""Check that torch.export still fails for the diffusers forwards that sd-ort replaces."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch


def assert_not_exportable(
    make: Callable[[], torch.nn.Module], arguments: tuple[torch.Tensor, ...], shapes: tuple[Mapping[int, Any], ...]
) -> None:
    """Assert that the module specializes a dynamic axis of `shapes`, and that its rotation is of complex numbers.

    `make` is called twice: a failed trace leaves its tensors in a module.
    """
    with pytest.raises(Exception, match=r"specialized|Constraints violated|Could not guard"):
        torch.export.export(make(), arguments, dynamic_shapes=shapes, strict=False)
    constant = torch.export.export(make(), arguments, strict=False)
    values = [node.meta.get("val") for node in constant.graph.nodes]
    assert any(isinstance(v, torch.Tensor) and v.is_complex() for v in values), "no complex numbers are left"
