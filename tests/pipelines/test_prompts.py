"""What a prompt can be beside plain text: weights, chunks, words of textual inversion, fewer layers of its encoder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from cli_type import success
from PIL import Image
from safetensors.torch import save_file

from sd_ort import StableDiffusionPipeline
from sd_ort.checkpoints.torch_pipeline import torch_pipeline
from sd_ort.core.errors import InputError
from sd_ort.graphs.text_encoder import modified_graph
from sd_ort.pipelines.prompt_weighting import chunks, parse

PROMPT = "a red circle on a blue background"
SETTINGS: dict[str, Any] = {"num_inference_steps": 1, "guidance_scale": 4.0, "height": 64, "width": 64}


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def reference(reference: Any) -> Any:
    # diffusers' clip_skip looks for transformers 4's name
    reference.text_encoder.__dict__["text_model"] = reference.text_encoder
    return reference


@pytest.fixture(scope="module")
def pipeline(small_export: Path) -> Any:
    return StableDiffusionPipeline.from_pretrained(small_export)


def embeddings(pipeline: Any, prompt: str = PROMPT, negative: str = "", **more: Any) -> np.ndarray:
    """(2, S, C): of the prompt and of the negative one, of either pipeline."""
    with torch.no_grad():
        return torch.cat(pipeline.encode_prompt(prompt, "cpu", 1, True, negative, **more)).numpy()


def latents(pipeline: Any, **arguments: Any) -> np.ndarray:
    call = {"prompt": PROMPT, **SETTINGS, "output_type": "latent", "progress": False, **arguments}
    return np.asarray(pipeline(**call, generator=3).images)


# --- Weights --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "fragments"),
    [
        ("a red circle, (small", [("a red circle, ", 1), ("small", 1.1)]),
        ("a (red:1.3) [big] circle", [("a ", 1), ("red", 1.3), (" ", 1), ("big", 1 / 1.1), (" circle", 1)]),
        ("((a) b:2)", [("a", 2.2), (" b", 2)]),
        ("(a [b] c:0.5)", [("a ", 0.5), ("b", 0.5 / 1.1), (" c", 0.5)]),
        (r"\(a\) \[b\] c\\d", [(r"(a) [b] c\d", 1)]),
        ("a) b] c: d (e: f)", [("a) b] c: d ", 1), ("e: f", 1.1)]),
        ("(a]:2) b", [("a]", 2), (" b", 1)]),
        ("", []),
    ],
)
def test_what_is_read(prompt: str, fragments: list[tuple[str, float]]) -> None:
    parsed = parse(prompt)
    assert [text for text, _ in parsed] == [text for text, _ in fragments]
    assert [weight for _, weight in parsed] == pytest.approx([weight for _, weight in fragments])


def test_chunks(pipeline: Any) -> None:
    """Of 75 tokens, each between the marks; BREAK begins one."""
    for prompt, counts in (("x" * 75, [75]), ("x" * 76, [75, 1]), ("a BREAK bc", [1, 2]), ("", [0])):
        result = chunks(pipeline.tokenizer, prompt, 77)
        assert [int((chunk.ids < 512).sum()) for chunk in result] == counts
        for chunk in result:
            assert (len(chunk.ids), chunk.ids[0], chunk.ids[-1]) == (77, 512, 513)


def test_a_prompt_without_weights_is_unchanged(pipeline: Any) -> None:
    np.testing.assert_array_equal(embeddings(pipeline, prompt_syntax="weights"), embeddings(pipeline))
    np.testing.assert_array_equal(latents(pipeline, prompt_syntax="weights"), latents(pipeline))
    assert not np.array_equal(latents(pipeline, prompt="(a:1.3)", prompt_syntax="weights"), latents(pipeline))


def test_weights_scale_their_tokens_and_keep_the_mean(reference: Any, pipeline: Any) -> None:
    """Against torch's embeddings of the same tokens."""
    plain = embeddings(reference, "ab cd")[0]
    expected = plain.copy()
    expected[3:5] *= 1.5  # the start mark and two letters come before: the vocabulary is one of bytes
    expected *= plain.mean() / expected.mean()
    actual = embeddings(pipeline, "ab (cd:1.5)", prompt_syntax="weights")[0]
    np.testing.assert_allclose(actual, expected, rtol=1e-3, atol=1e-4)


def test_long_prompts_are_laid_one_behind_the_other(reference: Any, pipeline: Any, caplog: Any) -> None:
    """And the shorter one is padded with empty chunks."""
    actual = embeddings(pipeline, "x" * 75 + "yz", "blurry", prompt_syntax="weights")
    assert actual.shape[1] == 2 * 77
    assert not caplog.records
    first, second, empty = (embeddings(reference, text)[0] for text in ("x" * 75, "yz", ""))
    np.testing.assert_allclose(actual[0, 77:], second, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(actual[1, 77:], empty, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(actual[0, :74], first[:74], rtol=1e-3, atol=1e-4)
    assert np.isfinite(latents(pipeline, prompt="x" * 80, prompt_syntax="weights")).all()


def test_the_command_takes_weights_and_words(sd_ort: Any, small_export: Path, tmp_path: Path) -> None:
    save_file({"<cat>": torch.ones(64)}, tmp_path / "cat.safetensors")
    out = tmp_path / "cat.png"
    success(
        sd_ort, "generate", "a (red:1.3) <cat>", "--model", small_export, "--steps", 1, "--height", 64, "--width", 64,
        "--seed", 1, "--out", out, "--weights", "--clip-skip", 1, "--embedding", tmp_path / "cat.safetensors",
    )  # fmt: skip
    ours = StableDiffusionPipeline.from_pretrained(small_export)
    ours.load_textual_inversion(tmp_path / "cat.safetensors")
    settings = {**SETTINGS, "guidance_scale": 7.5, "prompt_syntax": "weights", "clip_skip": 1}
    expected = ours("a (red:1.3) <cat>", **settings, generator=1, progress=False).images[0]
    np.testing.assert_array_equal(np.asarray(Image.open(out)), np.asarray(expected))


# --- Layers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("skip", [1, 3])
@pytest.mark.parametrize("kind", ["raw", "fused"])
def test_clip_skip(small_export: Path, small_fused: Path, reference: Any, kind: str, skip: int) -> None:
    ours = StableDiffusionPipeline.from_pretrained(small_export, low_memory=True)
    ours.models.files.folder = small_fused if kind == "fused" else small_export
    expected = embeddings(reference, clip_skip=skip)
    np.testing.assert_allclose(embeddings(ours, clip_skip=skip), expected, rtol=1e-3, atol=1e-4)
    assert np.abs(expected[0] - embeddings(reference)[0]).max() > 0.01, "without effect"


def test_clip_skip_of_more_layers_than_there_are(pipeline: Any) -> None:
    with pytest.raises(InputError, match="more than this text encoder's 3 layers"):
        embeddings(pipeline, clip_skip=4)


# --- Textual inversion ----------------------------------------------------------------------------------------------


def test_textual_inversion(small_export: Path, small_fused: Path, tmp_path: Path) -> None:
    """Words of three vectors and of one, as diffusers reads the same files, on the raw graph and on the fused one; and
    forgotten again. A WebUI's file without a word: its word is emb_params."""
    random = torch.Generator().manual_seed(1)
    shapes: dict[str, tuple[int, ...]] = {"<cat>": (3, 64), "<dog>": (64,), "emb_params": (2, 64)}
    for word, shape in shapes.items():
        save_file({word: torch.randn(shape, generator=random)}, tmp_path / f"{word}.safetensors")
    files = [str(tmp_path / f"{word}.safetensors") for word in shapes]
    theirs = torch_pipeline("sd15-small", random_weights=True, seed=0)
    theirs.text_encoder.__dict__["text_model"] = theirs.text_encoder
    theirs.load_textual_inversion(files)
    prompt = "a <cat> on a <dog> and a <cat> with emb_params"
    for folder in (small_export, small_fused):
        ours = StableDiffusionPipeline.from_pretrained(small_export)
        ours.models.files.folder = folder
        before = embeddings(ours, prompt)
        ours.load_textual_inversion(files)
        expected = embeddings(theirs, prompt)
        np.testing.assert_allclose(embeddings(ours, prompt), expected, rtol=1e-3, atol=1e-4)
        np.testing.assert_allclose(
            embeddings(ours, prompt, clip_skip=1), embeddings(theirs, prompt, clip_skip=1), rtol=1e-3, atol=1e-4
        )
        assert np.abs(expected[0] - before[0]).max() > 0.01, "without effect"
        ours.unload_textual_inversion()
        np.testing.assert_array_equal(embeddings(ours, prompt), before)


def test_words_with_a_table_in_half_precision(tmp_path: Path) -> None:
    """Target cpu casts the table to float32 before it looks words up; new words keep their float32."""
    graph = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["" : 20]> g (int64[N, S] input_ids) => (float[N, S, 2] out)
        { wide = Cast <to = 1> (table)  out = Gather (wide, input_ids) }"""
    )
    table = np.array([[1, 2], [3, 4], [5, 6]], np.float16)
    graph.graph.initializer.append(onnx.numpy_helper.from_array(table, "table"))
    onnx.save(graph, tmp_path / "model.onnx")
    rows = np.array([[0.1, 0.2]], np.float32)
    session = onnxruntime.InferenceSession(modified_graph(tmp_path / "model.onnx", 1, new_tokens=(3, rows)))
    np.testing.assert_array_equal(session.run(None, {"input_ids": np.array([[2, 3]])})[0], [[table[2], rows[0]]])


@pytest.mark.parametrize(
    ("tensors", "token", "message"),
    [
        ({"emb_params": torch.zeros(2, 65)}, None, "made for another model: its rows are 65 wide"),
        ({"emb_params": torch.full((1, 64), float("nan"))}, None, "not finite"),
        ({f"lora_{i}.weight": torch.zeros(4, 64) for i in range(3)}, None, "is no embedding of textual inversion"),
        ({"emb_params": torch.zeros(1, 64)}, "a", "is a word of this model already"),
        ({}, None, "empty"),
    ],
)
def test_files_that_are_refused(pipeline: Any, tmp_path: Path, tensors: Any, token: Any, message: str) -> None:
    save_file(tensors, tmp_path / "word.safetensors")
    with pytest.raises(InputError, match=message) as refusal:
        pipeline.load_textual_inversion(tmp_path / "word.safetensors", token)
    assert "from_single_file" not in str(refusal.value)
    assert not pipeline.texts.words


def test_a_pickle_is_refused(pipeline: Any, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="pickles"):
        pipeline.load_textual_inversion(tmp_path / "word.pt")
