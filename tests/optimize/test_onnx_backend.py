"""A quarter of the `onnx` package's own test cases through `optimize`; all of them: scripts/checks/onnx_backend.py."""

from __future__ import annotations

from collections import Counter

import pytest

from scripts.checks import onnx_backend

# Reasons for which `optimize` rejects a case that ONNX Runtime runs.
REJECTIONS = ("is no tensor of numbers", "ONNX Runtime rejects")


@pytest.mark.filterwarnings("ignore")
def test_a_quarter_of_the_cases_of_onnx(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in onnx_backend.UNRELEASED.items():
        monkeypatch.setenv(name, value)
    faults: list[str] = []
    counts = onnx_backend.run(0, onnx_backend.TARGETS, faults.append)
    assert faults == []
    verdicts: Counter[str] = Counter()
    for (_, verdict, reason), count in counts.items():
        verdicts[verdict] += count
        if verdict == onnx_backend.REFUSED:
            assert any(refusal in reason for refusal in REJECTIONS), reason
    assert verdicts[onnx_backend.EQUAL] > 1000, verdicts
    assert verdicts[onnx_backend.REFUSED] < 50, verdicts


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["test_attention_4d_fp16_expanded", "test_flexattention_fp16_expanded_ver26"])
def test_scales_of_scores_keep_float16(name: str) -> None:
    """Scales that were merged on the way became float32 constants beside float16 scores."""
    counts = onnx_backend.run(None, ["portable", "cpu"], lambda line: None, [name])
    assert {verdict for _, verdict, _ in counts} == {onnx_backend.EQUAL}
