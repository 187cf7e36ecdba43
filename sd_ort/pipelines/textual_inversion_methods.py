"""diffusers' methods of a pipeline for textual inversion."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sd_ort.core.errors import InputError
from sd_ort.pipelines.state import PipelineState


class TextualInversionMixin(PipelineState):
    """diffusers' methods for textual inversion."""

    def load_textual_inversion(
        self,
        pretrained_model_name_or_path: str | Path | Mapping[str, Any] | Sequence[Any],
        token: str | Sequence[str] | None = None,
        tokenizer: Any = None,
        text_encoder: Any = None,
    ) -> None:
        """Add words to the text encoders from a file, a dict of tensors, or a list of these.

        `tokenizer` or `text_encoder`: the pipeline's own, for a file that fits both of SDXL's.
        Raises InputError for a file that is no embedding or is for another model, and for a word that exists.
        """
        source = pretrained_model_name_or_path
        sources = list(source) if isinstance(source, (list, tuple)) else [source]
        tokens = list(token) if isinstance(token, (list, tuple)) else [token] * len(sources)
        if len(tokens) != len(sources) or (isinstance(token, str) and len(sources) > 1):
            raise InputError(f"{len(sources)} embeddings need as many tokens.")
        for embedding, word in zip(sources, tokens, strict=True):
            self.texts.add_token(embedding, word, tokenizer, text_encoder)

    def unload_textual_inversion(self) -> None:
        """Remove all words that were loaded."""
        self.texts.remove_added_tokens()
