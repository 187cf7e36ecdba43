"""scripts/amd/amd_resources.py --sources: rows of some kernels are replaced, the others stay."""

from __future__ import annotations

import amd_resources
import pytest

TABLE = "# Kernels\n\n| kernel | gfx942 |\n|---|---|\n| a_kernel<float> | 1 |\n| b_kernel<float> | 2 |\n"


def test_rows_of_a_template_are_replaced() -> None:
    new = "# Kernels\n\n| kernel | gfx942 |\n|---|---|\n| a_kernel<float, int> | 3 |\n"
    assert amd_resources.replace_rows(TABLE, new).endswith(
        "|---|---|\n| a_kernel<float, int> | 3 |\n| b_kernel<float> | 2 |\n"
    )
    assert amd_resources.replace_rows(TABLE, TABLE) == TABLE


def test_other_columns_are_refused() -> None:
    with pytest.raises(ValueError, match="other columns"):
        amd_resources.replace_rows(TABLE, TABLE.replace("gfx942", "gfx950"))
