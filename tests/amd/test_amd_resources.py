"""scripts/amd/amd_resources.py --sources: rows of some kernels are replaced, the others stay."""

from __future__ import annotations

import re
import sys

import pytest

from scripts.amd import amd_resources

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


def test_flags_are_those_of_the_library() -> None:
    """All of custom_ops/CMakeLists.txt that decide about machine code."""
    lists = (amd_resources.ROOT / "custom_ops/CMakeLists.txt").read_text()
    every_vendor = re.search(r"set\(flags (-std[^)]*)\)", lists)
    amd = re.search(r"set\(flags \$\{hidden\} (-D__HIP[^)]*)\)", lists)
    assert every_vendor
    assert amd
    words = [word for word in f"{every_vendor[1]} {amd[1]}".split() if "$" not in word]
    assert tuple(word for word in words if word not in ("-c", "-Wno-unused-command-line-argument")) == (
        amd_resources.FLAGS
    )


def test_a_wheel_has_no_sources(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["amd_resources.py", "a.whl", "--sources", "a.hip"])
    with pytest.raises(SystemExit):
        amd_resources.main()
    assert "a wheel cannot be given too" in capsys.readouterr().err
