"""The SentencePiece tokenizer that a GGUF file's metadata describes: tokens and scores, no merges.

In: a `GgufFile` whose `tokenizer.ggml.model` is "llama". Out: a `tokenizers.Tokenizer` giving the ids transformers
gives for the same file, because adapters are trained with those. As there, the vocabulary becomes byte-pair encoding:
two tokens that together spell a third are merged into it, the better token first. Which token is better its score
says, but of Gemma's its place in the file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import tokenizers

from app.engine.errors import CheckpointError
from app.engine.models.gguf_file import GgufFile
from app.engine.models.tokenizer_classes import CLASSES

#: Architectures whose files are read by another class than `LlamaTokenizer`.
_CLASSES = {"gemma2": "GemmaTokenizer", "gemma3": "GemmaTokenizer"}
_SPACE = "▁"
_NAMED = {"unk_token": "unknown", "bos_token": "bos", "eos_token": "eos", "pad_token": "padding"}


def sentencepiece_from_gguf(file: GgufFile) -> tuple[tokenizers.Tokenizer, list[str]]:
    """The tokenizer without added tokens, and the special tokens that its class brings and the vocabulary has.

    CheckpointError if the metadata is not that of such a vocabulary.
    """
    tokens, scores = file.metadata.get("tokenizer.ggml.tokens"), file.metadata.get("tokenizer.ggml.scores")
    if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens):
        raise CheckpointError("the GGUF file lacks tokenizer.ggml.tokens")
    if not isinstance(scores, list) or len(scores) != len(tokens):
        num_scores = len(scores) if isinstance(scores, list) else 0
        raise CheckpointError(f"tokenizer.ggml.scores has {num_scores} entries for {len(tokens)} tokens")
    name = _CLASSES.get(str(file.metadata.get("general.architecture")), "LlamaTokenizer")
    if name == "GemmaTokenizer":
        tokens, scores = [_with_marks(token) for token in tokens], range(0, -len(tokens), -1)
    vocab = {token: index for index, token in enumerate(tokens)}
    named = dict(CLASSES[name].named) | _own_names(file, tokens)
    if named["unk_token"] not in vocab:
        raise CheckpointError(f"the GGUF file's vocabulary lacks the unknown token {named['unk_token']!r}")
    build = CLASSES[name].build
    assert build is not None, "Llama's and Gemma's classes are over merges"
    try:
        built = build(vocab, _merges(vocab, dict(zip(tokens, scores, strict=True))), named)
    except Exception as error:  # the binding raises bare Exception
        raise CheckpointError(f"no tokenizer can be made of the GGUF file's vocabulary: {error}") from error
    return built, [token for token in named.values() if token in vocab]


def _with_marks(token: str) -> str:
    """Gemma's files spell a run of spaces as spaces."""
    return _SPACE * len(token) if " " in token and not token.strip() else token


def _own_names(file: GgufFile, tokens: Sequence[str]) -> dict[str, str]:
    """The special tokens that the file names."""
    found = {name: file.metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in _NAMED.items()}
    return {
        name: tokens[token_id]
        for name, token_id in found.items()
        if isinstance(token_id, int) and 0 <= token_id < len(tokens)
    }


def _merges(vocab: Mapping[str, int], scores: Mapping[str, float]) -> list[tuple[str, str]]:
    """Every pair of tokens that spells a token, the pairs of higher scores first, then those of longer left parts."""
    merges = []
    for token, score in scores.items():
        for split in range(len(token) - 1, 0, -1):
            left, right = token[:split], token[split:]
            if left in vocab and right in vocab:
                merges.append((score, split, len(token) - split, left, right))
    merges.sort(key=lambda merge: merge[:3], reverse=True)
    return [(left, right) for *_, left, right in merges]
