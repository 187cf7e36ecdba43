"""Conditioning of the UNet for prompts: embeddings, and the further inputs of SDXL."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from sd_ort.checkpoints.conditioning import embedding_output, guidance_embedding, text_encoders, text_length, token_ids
from sd_ort.checkpoints.configs import component_config
from sd_ort.checkpoints.tokenizer import ClipTokenizer
from sd_ort.checkpoints.unet_inputs import is_sdxl, time_ids_split
from sd_ort.core.errors import InputError
from sd_ort.graphs.text_encoder import modified_graph
from sd_ort.pipelines import prompt_weighting, textual_inversion
from sd_ort.pipelines.images import as_array
from sd_ort.pipelines.prompt_weighting import Chunk
from sd_ort.pipelines.request import Request, Size
from sd_ort.pipelines.sampling_job import PromptTokens, check_finite
from sd_ort.pipelines.textual_inversion import LearnedTokens
from sd_ort.runtime.components import Components
from sd_ort.runtime.session import OrtModel


@dataclass
class Conditioning:
    """Conditioning of prompts: embeddings (B, S, C) and, for SDXL, further inputs by name (B, ...). All float32."""

    embeddings: np.ndarray
    added: dict[str, np.ndarray] = field(default_factory=dict)

    def repeat(self, count: int) -> Conditioning:
        """Repeat each prompt's row `count` times, for several images a prompt."""
        return Conditioning(
            self.embeddings.repeat(count, 0), {name: value.repeat(count, 0) for name, value in self.added.items()}
        )

    def after(self, first: Conditioning) -> Conditioning:
        """Return the rows of `first`, then these: the order of classifier-free guidance (negative, positive)."""
        if first.embeddings.shape != self.embeddings.shape:
            shapes = [list(rows.embeddings.shape) for rows in (self, first)]
            raise InputError(f"prompt embeddings of {shapes[0]} and negative ones of {shapes[1]} differ in shape.")
        return Conditioning(
            np.concatenate([first.embeddings, self.embeddings]),
            {name: np.concatenate([first.added[name], value]) for name, value in self.added.items()},
        )


class PromptEncoder:
    """A folder's tokenizers and text encoders."""

    def __init__(self, folder: Path, models: Components, index: Mapping[str, Any], unet: Mapping[str, Any]) -> None:
        """`index`: the folder's model_index.json; `unet`: its config. Raises InputError without a tokenizer."""
        self.folder, self.models, self.index, self.unet = folder, models, index, unet
        self.is_sdxl = is_sdxl(unet)
        self.words: dict[str, LearnedTokens] = {}
        self.lengths: dict[str, int] = {}  # number of tokens by encoder
        self.remove_added_tokens()

    def remove_added_tokens(self) -> None:
        """Remove all words of textual inversion."""
        names = text_encoders(dict(self.index))
        self.encoders = [
            (ClipTokenizer(self.folder / name.replace("text_encoder", "tokenizer")), name) for name in names
        ]
        for name in self.words:
            self.models.drop_variants(name)
        self.words = {}

    def fix_length(self) -> None:
        """Open the encoders for their full length: the mask is then a constant, and no kernel runs on the CPU."""
        for tokenizer, name in self.encoders:
            sizes = dict.fromkeys(("sequence", "sequence_length"), self._length(tokenizer, name))  # ours, Optimum's
            self.models.overrides.free_dimensions[name] = sizes

    def _length(self, tokenizer: ClipTokenizer, name: str) -> int:
        if name not in self.lengths:
            self.lengths[name] = text_length(self.folder, name, tokenizer)
        return self.lengths[name]

    def add_token(self, source: Any, token: str | None, tokenizer: Any = None, text_encoder: Any = None) -> None:
        """Add a word of textual inversion; arguments and errors as in `textual_inversion.read` and `learn`."""
        chosen = [
            n
            for t, n in self.encoders
            if tokenizer is t or (text_encoder is not None and text_encoder is self.models[n])
        ]
        widths = {n: component_config(self.folder, n, required=True)["hidden_size"] for _, n in self.encoders}
        for name, (word, rows) in textual_inversion.read(source, token, widths, chosen[0] if chosen else None).items():
            own_tokenizer = next(t for t, n in self.encoders if n == name)
            self.words[name] = textual_inversion.learn(own_tokenizer, self.words.get(name), word, rows)
            self.models.drop_variants(name)

    def condition(self, request: Request) -> Conditioning:
        """Return the conditioning of all rows: with guidance 2B, negative first."""
        sizes = self._sizes(request)
        prompts = self._positive(request)
        positive = self._with_sizes(prompts, sizes[0]).repeat(request.num_images_per_prompt)
        if request.embedded_guidance is not None:
            embedding = guidance_embedding(request.embedded_guidance, self.unet["time_cond_proj_dim"])
            positive.added["timestep_cond"] = embedding.repeat(request.batch, 0)
        if request.guidance is None:
            return positive
        negative = self._with_sizes(self._negative(request, prompts), sizes[1]).repeat(request.num_images_per_prompt)
        return positive.after(negative)

    def tokens(self, request: Request) -> PromptTokens | None:
        """Return the tokens of plain prompts, for text encoders on the device.

        Returns None for embeddings, prompt weights, skipped layers and words of textual inversion.
        """
        has_embeddings = request.prompt_embeds is not None or request.negative_prompt_embeds is not None
        if has_embeddings or request.clip_skip or self.words or request.prompt_syntax != "plain":
            return None
        texts = self.pair(request.prompts, self._second(request))
        zeroed = request.guidance is not None and self.zero_negative(request)
        negative = [] if request.guidance is None or zeroed else self._negatives(request)
        ids, outputs = {}, {}
        for (tokenizer, name), positive, negatives in zip(
            self.encoders, texts, negative or [[]] * len(texts), strict=True
        ):
            model = self.models[name]
            if list(model.inputs) != ["input_ids"]:
                return None
            ids[name] = token_ids(tokenizer, [*negatives, *positive], self._length(tokenizer, name))
            outputs[name] = embedding_output(model.outputs, self.is_sdxl)
        count = len(request.prompts)
        row = np.arange(count) + (len(negative[0]) if negative else 0)
        first = [np.arange(count)] if request.guidance is not None else []
        rows = np.concatenate([*first, row]).repeat(request.num_images_per_prompt)
        sizes = self._sizes(request)
        pairs = [sizes[1]] * (request.batch * len(first)) + [sizes[0]] * request.batch
        conditioning = {"time_ids": np.array(pairs, np.float32)} if self.is_sdxl else {}
        if request.embedded_guidance is not None:
            embedded = guidance_embedding(request.embedded_guidance, self.unet["time_cond_proj_dim"])
            conditioning["timestep_cond"] = embedded.repeat(len(rows), 0)
        return PromptTokens(ids, outputs, rows, (np.arange(len(rows)) < request.batch) & zeroed, conditioning)

    def encode(
        self, prompts: Sequence[Sequence[str]], clip_skip: int | None = None, runs: int | None = None
    ) -> Conditioning:
        """Return float32 embeddings (B, S, C) of prompts, a list of B for each encoder. Warns of truncated prompts.

        SDXL concatenates both encoders' penultimate layers on C and adds the second's pooled `text_embeds` (B, D).
        `runs`: parse weights, with this number of chunks of S / runs tokens a prompt (`prompt_weighting`).
        """
        hidden: list[np.ndarray] = []
        added: dict[str, np.ndarray] = {}
        for (tokenizer, name), texts in zip(self.encoders, prompts, strict=True):
            length = self._length(tokenizer, name)
            weights = None
            if runs is None:
                tokens = token_ids(tokenizer, self._spelled(name, texts), length)
            else:
                parts = [part for text in texts for part in self._chunks(tokenizer, name, text, length, runs)]
                tokens, weights = (np.stack(rows) for rows in zip(*((p.ids, p.weights) for p in parts), strict=True))
            outputs = self._encoder(name, clip_skip or 0)(input_ids=tokens)
            embeddings = outputs[embedding_output(outputs, self.is_sdxl)].astype(np.float32)
            check_finite(embeddings, name)
            if weights is not None:
                embeddings = prompt_weighting.apply_token_weights(embeddings, weights)
            hidden.append(embeddings.reshape(len(texts), -1, embeddings.shape[-1]))
            if "text_embeds" in outputs:
                added["text_embeds"] = outputs["text_embeds"].astype(np.float32)[:: runs or 1]
        return Conditioning(np.concatenate(hidden, -1), added)

    def _encoder(self, name: str, skip: int) -> OrtModel:
        """Return a text encoder without its last `skip` layers, with the words of textual inversion."""
        words = self.words.get(name)
        if not skip and words is None:
            return self.models[name]
        layers = component_config(self.folder, name, required=True)["num_hidden_layers"]
        learned = None if words is None else (words.first, words.table)
        return self.models.variant(name, f"skip {skip}", lambda path: modified_graph(path, layers, skip, learned))

    def _spelled(self, name: str, texts: Sequence[str]) -> list[str]:
        words = self.words.get(name)
        return list(texts) if words is None else [words.spelled_out(text) for text in texts]

    def _chunks(self, tokenizer: Any, name: str, text: str, length: int, runs: int) -> list[Chunk]:
        """Return the chunks of a prompt, and empty ones up to `runs`."""
        chunks = prompt_weighting.chunks(tokenizer, self._spelled(name, [text])[0], length)
        return chunks + [prompt_weighting.chunk(tokenizer, [], length)] * (runs - len(chunks))

    def _runs(self, request: Request) -> int | None:
        """Return the number of chunks of a call's longest text; None for prompts without weights."""
        if request.prompt_syntax == "plain":
            return None
        texts = [request.prompt, request.prompt_2, request.negative_prompt, request.negative_prompt_2]
        every = [text for value in texts for text in ([value] if isinstance(value, str) else value or [])]
        return max(
            len(self._chunks(tokenizer, name, text, self._length(tokenizer, name), 0))
            for tokenizer, name in self.encoders
            for text in every or [""]
        )

    def zero_negative(self, request: Request) -> bool:
        """Return whether the unconditional rows are zeros, as in SDXL's training, instead of an empty prompt's rows."""
        zeros = bool(self.index.get("force_zeros_for_empty_prompt", True))
        return self.is_sdxl and request.negative_prompt is None and zeros

    def pair(self, first: Sequence[str], second: Sequence[str] | None) -> list[Sequence[str]]:
        """Return the prompts of each encoder: `second` are those of the second one, which SDXL's refiner lacks."""
        return [first, first if second is None else second][: len(self.encoders)]

    def _positive(self, request: Request) -> Conditioning:
        if request.prompt_embeds is not None:
            return self._from_embeddings(request.prompt_embeds, request.pooled_prompt_embeds, "prompt_embeds")
        return self.encode(self.pair(request.prompts, self._second(request)), request.clip_skip, self._runs(request))

    def _second(self, request: Request) -> Sequence[str] | None:
        return request.per_prompt(request.prompt_2, "second prompts") if request.prompt_2 else None

    def _negative(self, request: Request, positive: Conditioning) -> Conditioning:
        if request.negative_prompt_embeds is not None:
            return self._from_embeddings(
                request.negative_prompt_embeds, request.negative_pooled_prompt_embeds, "negative_prompt_embeds"
            )
        if self.zero_negative(request):
            zeros = {name: np.zeros_like(value) for name, value in positive.added.items()}
            return Conditioning(np.zeros_like(positive.embeddings), zeros)
        return self.encode(self._negatives(request), runs=self._runs(request))

    def _negatives(self, request: Request) -> list[Sequence[str]]:
        second = request.per_prompt(request.negative_prompt_2) if request.negative_prompt_2 else None
        return self.pair(request.per_prompt(request.negative_prompt), second)

    def _from_embeddings(self, embeddings: Any, pooled: Any, name: str) -> Conditioning:
        """Return the conditioning of embeddings. Raises InputError for shapes that the UNet does not have."""
        width = self.unet["cross_attention_dim"]
        if embeddings.ndim != 3 or embeddings.shape[2] != width:
            raise InputError(
                f"{name} of {list(embeddings.shape)} were given where [prompts, tokens, {width}] are read."
            )
        if not self.is_sdxl:
            return Conditioning(as_array(embeddings))
        if pooled is None:
            raise InputError(f"{name} of SDXL need their {name.replace('prompt', 'pooled_prompt')} beside.")
        return Conditioning(as_array(embeddings), {"text_embeds": as_array(pooled)})

    def _with_sizes(self, conditioning: Conditioning, ids: Sequence[float]) -> Conditioning:
        """Add SDXL's `time_ids` (B, 6), or (B, 5) for its refiner."""
        if not self.is_sdxl:
            return conditioning
        rows = np.array([list(ids)] * len(conditioning.embeddings), np.float32)
        return Conditioning(conditioning.embeddings, {**conditioning.added, "time_ids": rows})

    def _sizes(self, request: Request) -> tuple[list[float], list[float]]:
        """Return SDXL's time_ids of the positive and the negative rows.

        These are original size, crop corner and target size, each (height, width). The refiner has the aesthetic score
        instead of the target size.

        As in diffusers, text to image uses the negative sizes only if both are set; image to image always does.
        """
        scored = time_ids_split(self.unet)[1] == 5 if self.is_sdxl else False

        def ids(original: Size, crop: Size, target: Size, score: float) -> list[float]:
            return [*original, *crop, *((score,) if scored else target)]

        size = request.size
        original, target = request.original_size or size, request.target_size or size
        positive = ids(original, request.crops_coords_top_left, target, request.aesthetic_score)
        both = request.negative_original_size is not None and request.negative_target_size is not None
        if request.image is None and not both:
            return positive, ids(original, request.crops_coords_top_left, target, request.negative_aesthetic_score)
        negative = request.negative_original_size or original, request.negative_target_size or target
        # diffusers: text to image and the refiner tell the negative rows a crop of their own, and no other.
        own = scored or request.image is None
        crop = request.negative_crops_coords_top_left if own else request.crops_coords_top_left
        return positive, ids(negative[0], crop, negative[1], request.negative_aesthetic_score)
