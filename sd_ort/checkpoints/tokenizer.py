"""CLIP tokenizer of a pipeline folder, by the small `tokenizers` library: importing transformers takes seconds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sd_ort.core.errors import InputError, first_line
from sd_ort.core.files import JSON_LIMIT, check_regular, read_json, read_regular

SPLIT = r"<\|startoftext\|>|<\|endoftext\|>|'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"  # OpenAI's CLIP
START, END = "<|startoftext|>", "<|endoftext|>"


class ClipTokenizer:
    """CLIP tokenizer: text -> token ids with the start and the end token.

    Other attributes are those of transformers' tokenizer, which is loaded at the first access and encodes from then on,
    since callers may change it.
    """

    def __init__(self, folder: Path) -> None:
        """Raises InputError for a folder that holds no CLIP tokenizer."""
        self.folder = folder
        self._transformers: Any = None
        self._added: list[str] = []
        if not ((folder / "tokenizer.json").is_file() or all((folder / n).is_file() for n in FILES)):
            # Without files transformers makes one that knows no word.
            raise InputError(f"{folder} holds no CLIP tokenizer, tokenizer.json is missing: export the pipeline again.")
        try:
            self._load()
        except Exception as error:  # JSON and the library's Rust half each fail in their own ways
            raise _no_tokenizer(folder, error) from error

    def _load(self) -> None:
        from tokenizers import Regex as Pattern
        from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

        config = _json(self.folder / "tokenizer_config.json") | _json(self.folder / "special_tokens_map.json")
        vocabulary, merges, added = _vocabulary(self.folder)
        special = {name: config.get(f"{name}_token") or default for name, default in
                   (("bos", START), ("eos", END), ("unk", END), ("pad", END))}  # fmt: skip
        texts = {name: token["content"] if isinstance(token, dict) else token for name, token in special.items()}
        model = models.BPE(
            vocabulary, merges, continuing_subword_prefix="", end_of_word_suffix="</w>", unk_token=texts["unk"]
        )
        rules: Any = Tokenizer(model)
        lower = [normalizers.NFC(), normalizers.Replace(Pattern(r"\s+"), " "), normalizers.Lowercase()]
        rules.normalizer = normalizers.Sequence(lower)
        split = pre_tokenizers.Split(Pattern(SPLIT), behavior="removed", invert=True)
        rules.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False)])
        rules.decoder = decoders.ByteLevel()
        added += [entry for _, entry in sorted(config.get("added_tokens_decoder", {}).items())]
        tokens = {entry["content"]: _added_token(entry, special=entry.get("special", False)) for entry in added}
        named: dict[str, Any] = {}  # as transformers: of several declarations of a token the last new one holds
        for name, token in special.items():
            if texts[name] not in tokens and token not in list(special.values())[: list(special).index(name)]:
                named[texts[name]] = _added_token(token, special=True)
        for token in (*tokens.values(), *named.values()):
            rules.add_special_tokens([token]) if token.special else rules.add_tokens([token])
        ids = {name: rules.token_to_id(text) for name, text in texts.items()}
        end, start = ((texts[name], ids[name]) for name in ("eos", "bos"))
        rules.post_processor = processors.RobertaProcessing(end, start, trim_offsets=False, add_prefix_space=False)
        self._rules = rules
        self.bos_token_id, self.eos_token_id, self.pad_token_id = (int(ids[name]) for name in ("bos", "eos", "pad"))
        self.model_max_length: int = int(config.get("model_max_length") or 77)

    @property
    def transformers(self) -> Any:
        """transformers' tokenizer of the folder, with the tokens that were added."""
        if self._transformers is None:
            self._transformers = load_hf_tokenizer(self.folder)
            if self._added:
                self._transformers.add_tokens(self._added)
        return self._transformers

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """As transformers' tokenizer."""
        return self.transformers(*arguments, **options)

    def __len__(self) -> int:
        return len(self._transformers) if self._transformers is not None else int(self._rules.get_vocab_size())

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.transformers, name)

    def get_vocab(self) -> dict[str, int]:
        return dict((self._transformers or self._rules).get_vocab())

    def add_tokens(self, tokens: Sequence[str]) -> int:
        """Add tokens that a text is split at; returns their number."""
        self._added += tokens
        if self._transformers is not None:
            self._transformers.add_tokens(list(tokens))
        return int(self._rules.add_tokens(list(tokens)))

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self._rules.decode(list(ids), skip_special_tokens=False)
        return text.replace("</w>", " ").strip()

    def ids(self, texts: Sequence[str], *, special: bool = True) -> list[list[int]]:
        """Return the token ids of each text without padding. special: add the start and end tokens."""
        if self._transformers is not None:
            encoded = self._transformers(list(texts), add_special_tokens=special, verbose=False).input_ids
            return [list(ids) for ids in encoded]
        # encode_batch takes as long for a call's prompts where cores are idle, and waits for threads where they are not
        return [self._rules.encode(text, add_special_tokens=special).ids for text in texts]


FILES = ("vocab.json", "merges.txt")


def _vocabulary(folder: Path) -> tuple[dict[str, int], list[tuple[str, str]], list[dict[str, Any]]]:
    """Return the token ids, the merges, and the tokens added to them."""
    if all((folder / name).is_file() for name in FILES):
        lines = read_regular(folder / FILES[1], folder.parent, JSON_LIMIT).decode().splitlines()
        merges = [tuple(line.split()) for line in lines if line and not line.startswith("#version")]
        added = sorted(_json(folder / "added_tokens.json").items(), key=lambda item: item[1])
        return read_json(folder / FILES[0], root=folder.parent), merges, [{"content": text} for text, _ in added]  # type: ignore[return-value]
    rules = read_json(folder / "tokenizer.json", root=folder.parent)
    merges = [tuple(merge.split(" ") if isinstance(merge, str) else merge) for merge in rules["model"]["merges"]]
    return rules["model"]["vocab"], merges, rules.get("added_tokens", [])  # type: ignore[return-value]


def _added_token(token: str | dict[str, Any], *, special: bool) -> Any:
    from tokenizers import AddedToken

    if isinstance(token, str):
        return AddedToken(token, special=special, normalized=not special)
    fields = ("single_word", "lstrip", "rstrip", "normalized")
    options = {name: token[name] for name in fields if name in token}
    return AddedToken(token["content"], special=special, **options)


def _json(path: Path) -> dict[str, Any]:
    return read_json(path, root=path.parent.parent) if path.is_file() else {}


def load_hf_tokenizer(folder: Path) -> Any:
    """Return transformers' tokenizer of a folder. Raises InputError if the folder holds none."""
    from transformers import CLIPTokenizer

    try:
        for path in folder.iterdir():
            check_regular(path, folder.parent, JSON_LIMIT)
        return CLIPTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # transformers and its Rust half each fail in their own ways
        raise _no_tokenizer(folder, error) from error


def _no_tokenizer(folder: Path, error: Exception) -> InputError:
    return InputError(f"{folder} holds no CLIP tokenizer ({first_line(error)}): export the pipeline again.")
