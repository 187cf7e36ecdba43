"""Tests of FLUX.2 dev's text encoder and tokenizer beside transformers. `tests/parity` compares its images."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformer_families import built, nmse

from sd_ort.checkpoints.modules import wrap
from sd_ort.checkpoints.prompt_tokenizers import SYSTEM_MESSAGE, MistralTokenizer
from sd_ort.checkpoints.random_weights import write_mistral_tokenizer
from sd_ort.core.errors import InputError
from sd_ort.pipelines.transformer_flux2 import Flux2KleinPipeline, Flux2Pipeline

FAMILY = "flux2"


@pytest.mark.parametrize("side", ["left", "right"])
def test_the_text_encoder_equals_transformers(side: str) -> None:
    """Each token, padding too, which the transformer reads; without the rows of zeros, padding on the left differs."""
    ids = torch.randint(256, (2, 11), generator=torch.Generator().manual_seed(0))
    mask = torch.ones(2, 11, dtype=torch.long)
    mask[1, slice(4) if side == "left" else slice(7, None)] = 0
    module = wrap("text_encoder", built(FAMILY, "text_encoder"), False, False)
    with torch.no_grad():
        outputs = built(FAMILY, "text_encoder")(input_ids=ids, attention_mask=mask, output_hidden_states=True)
        expected = torch.cat([outputs.hidden_states[layer] for layer in (1, 2, 3)], dim=-1)
        assert nmse(module(ids, mask), expected) <= 1e-11
        for layer in module._stack().layers:
            layer.self_attn._forward_hooks.clear()
        assert (nmse(module(ids, mask), expected) >= 1e-4) == (side == "left")


def test_the_chat_is_that_of_diffusers(tmp_path: Path) -> None:
    """Token ids and mask of prompts that are padded, cut, and have a token of images."""
    from diffusers.pipelines.flux2 import system_messages
    from diffusers.pipelines.flux2.pipeline_flux2 import format_input
    from transformers import AutoTokenizer

    assert SYSTEM_MESSAGE == system_messages.SYSTEM_MESSAGE
    write_mistral_tokenizer(tmp_path)
    prompts, length = ["a", "Blue circles; on the left, [IMG]é", 9 * "a red square "], 240
    expected = AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(
        format_input(prompts), add_generation_prompt=False, tokenize=True, return_dict=True, return_tensors="np",
        padding="max_length", truncation=True, max_length=length,
    )  # fmt: skip
    ids, mask = MistralTokenizer(tmp_path).encode(prompts, length)
    assert (ids == expected["input_ids"]).all()
    assert (mask == expected["attention_mask"]).all()
    assert mask[0, 0] == 0, "the first is padded on the left"
    assert mask[2].all(), "the last is cut"


@pytest.mark.parametrize("missing", [Flux2KleinPipeline, Flux2Pipeline])
def test_a_folder_of_the_other_model_is_refused(tmp_path: Path, missing: type[Flux2Pipeline]) -> None:
    other = Flux2Pipeline if missing is Flux2KleinPipeline else Flux2KleinPipeline
    (tmp_path / "model_index.json").write_text(f'{{"_class_name": "{other.__name__}"}}')
    with pytest.raises(InputError, match=f"holds a {other.__name__}, not a {missing.__name__}"):
        missing.check_folder(tmp_path)
