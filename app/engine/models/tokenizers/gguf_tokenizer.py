"""Builds the tokenizer that a GGUF file's metadata describes: byte-level BPE or SentencePiece.

Ids are transformers' for the same file, because adapters are trained with those. GGUF names the pre-tokenizer
(`tokenizer.ggml.pre`) but does not store its pattern, so known ones are a table and any other is refused: a near miss
would silently change ids. A SentencePiece vocabulary has tokens and scores but no merges; as in transformers it becomes
byte-pair encoding: two tokens whose concatenation is a token are merged, better scores first. Gemma's score is the
token's position in the file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, processors

from app.engine.errors import CheckpointError
from app.engine.models.gguf.gguf_file import GgufFile
from app.engine.models.tokenizers.hf_tokenizer_classes import CLASSES

_CONTROL, _USER_DEFINED = 3, 4  # llama.cpp's token types
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LLAMA3 = _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# o200k's pattern (gpt-oss), as OpenAI publishes it: Tekken's with contractions, and at most three digits together.
_GPT_4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    + _CONTRACTION
    + r"?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    + _CONTRACTION
    + r"?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# None: GPT-2's pattern, built into ByteLevel. llama.cpp also isolates digits for smollm; transformers does
# not, no merge contains a digit, and so ids differ only where two or more white spaces precede a digit.
_SPLITS: dict[str, str | None] = {
    "gpt-2": None,
    "smollm": None,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "smaug-bpe": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "tekken": _TEKKEN,
    "gpt-4o": _GPT_4O,
}
#: Architectures with another class than `LlamaTokenizer`.
_SENTENCEPIECE_CLASSES = {"gemma2": "GemmaTokenizer", "gemma3": "GemmaTokenizer"}
_SPACE = "▁"
_NAMED_TOKENS = {"unk_token": "unknown", "bos_token": "bos", "eos_token": "eos", "pad_token": "padding"}


def tokenizer_from_gguf(file: GgufFile) -> tokenizers.Tokenizer:
    """Build it; CheckpointError names an unknown tokenizer or pre-tokenizer."""
    kind, pre = file.metadata.get("tokenizer.ggml.model"), file.metadata.get("tokenizer.ggml.pre")
    if kind == "llama":
        if pre not in (None, "default"):
            raise CheckpointError(f"GGUF pre-tokenizer {pre!r} does not go with tokenizer 'llama'; only 'default' does")
        tokenizer, named = _sentencepiece(file)
        vocab = tokenizer.get_vocab()
        _add_tokens(tokenizer, file, named, lambda token: token in vocab)
        _add_template(tokenizer, file, has_bos=True)
        return tokenizer
    if kind != "gpt2":
        raise CheckpointError(
            f"GGUF tokenizer {kind!r} is not supported, only 'gpt2' (byte-level BPE) and 'llama' (SentencePiece); "
            "use the model's folder with tokenizer.json instead"
        )
    tokenizer = _byte_level(file, pre)
    _add_tokens(tokenizer, file, (), lambda token: _in_byte_alphabet(token) == token)
    _add_template(tokenizer, file, has_bos=False)
    return tokenizer


def _byte_level(file: GgufFile, pre: object) -> tokenizers.Tokenizer:
    """Without added tokens."""
    if not isinstance(pre, str) or pre not in _SPLITS:
        raise CheckpointError(f"GGUF pre-tokenizer {pre!r} is not known; known are {', '.join(_SPLITS)}")
    tokens, merges = file.metadata.get("tokenizer.ggml.tokens"), file.metadata.get("tokenizer.ggml.merges")
    if not isinstance(tokens, list) or not isinstance(merges, list):
        raise CheckpointError("the GGUF file lacks tokenizer.ggml.tokens or tokenizer.ggml.merges")
    vocab = {_in_byte_alphabet(token): index for index, token in enumerate(tokens)}
    pairs = [tuple(merge.split(" ")) for merge in merges]
    try:
        tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=pairs))
    except Exception as error:  # the binding raises bare Exception
        raise CheckpointError(f"the GGUF file's merges do not fit its vocabulary: {error}") from error
    split = _SPLITS[pre]
    if split is None:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(split), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def gguf_token_id(file: GgufFile, key: str) -> int | None:
    """`tokenizer.ggml.<key>_token_id`, checked against the vocabulary."""
    value = file.metadata.get(f"tokenizer.ggml.{key}_token_id")
    if value is None:
        return None
    size = len(file.metadata["tokenizer.ggml.tokens"])
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < size:
        raise CheckpointError(f"tokenizer.ggml.{key}_token_id is {value!r}; the vocabulary has {size} tokens")
    return value


def byte_of_char() -> dict[str, int]:
    """GPT-2's byte alphabet: printable Latin-1 characters stand for themselves, the other bytes are U+0100 on."""
    own = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in own]
    return {chr(byte): byte for byte in own} | {chr(256 + rank): byte for rank, byte in enumerate(others)}


_BYTE_OF_CHAR = byte_of_char()
_CHAR_OF_BYTE = {byte: char for char, byte in _BYTE_OF_CHAR.items()}


def _in_byte_alphabet(token: str) -> str:
    """A token in the byte alphabet; some converters store added tokens as plain text."""
    if all(char in _BYTE_OF_CHAR for char in token):
        return token
    return "".join(_CHAR_OF_BYTE[byte] for byte in token.encode())


def _add_tokens(
    tokenizer: tokenizers.Tokenizer, file: GgufFile, named: Sequence[str], is_own: Callable[[str], bool]
) -> None:
    """Control tokens and `named` ones are matched whole and special; user-defined ones whole and ordinary.

    is_own: whether the vocabulary has a token as the file spells it.
    """
    tokens = file.metadata["tokenizer.ggml.tokens"]
    types = file.metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    if len(types) != len(tokens):
        raise CheckpointError(f"tokenizer.ggml.token_type has {len(types)} entries for {len(tokens)} tokens")
    special = [gguf_token_id(file, key) for key in ("bos", "eos", "unknown", "padding")]
    control = {index for index, kind in enumerate(types) if kind == _CONTROL} | {i for i in special if i is not None}
    whole = [*named, *(tokens[index] for index in sorted(control) if is_own(tokens[index]))]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in whole])
    user = [token for token, kind in zip(tokens, types, strict=True) if kind == _USER_DEFINED and is_own(token)]
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in user])


def _add_template(tokenizer: tokenizers.Tokenizer, file: GgufFile, has_bos: bool) -> None:
    """Put bos and eos around a text if the file asks for it; has_bos: the default for bos."""
    tokens = file.metadata["tokenizer.ggml.tokens"]
    template, special = [], []
    for key, place, default in (("bos", 0, has_bos), ("eos", 1, False)):
        is_requested, token_id = file.metadata.get(f"tokenizer.ggml.add_{key}_token", default), gguf_token_id(file, key)
        if not is_requested:
            continue
        if token_id is None:
            raise CheckpointError(
                f"the GGUF file's texts get an {key} token but tokenizer.ggml.{key}_token_id is missing"
            )
        template.append((place, tokens[token_id]))
        special.append((tokens[token_id], token_id))
    if template:
        before = [token for place, token in template if place == 0]
        after = [token for place, token in template if place == 1]
        tokenizer.post_processor = processors.TemplateProcessing(single=[*before, "$A", *after], special_tokens=special)


def _sentencepiece(file: GgufFile) -> tuple[tokenizers.Tokenizer, list[str]]:
    """The tokenizer without added tokens, and its class's special tokens that are in the vocabulary.

    CheckpointError if the metadata is not that of such a vocabulary.
    """
    tokens, scores = file.metadata.get("tokenizer.ggml.tokens"), file.metadata.get("tokenizer.ggml.scores")
    if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens):
        raise CheckpointError("the GGUF file lacks tokenizer.ggml.tokens")
    if not isinstance(scores, list) or len(scores) != len(tokens):
        num_scores = len(scores) if isinstance(scores, list) else 0
        raise CheckpointError(f"tokenizer.ggml.scores has {num_scores} entries for {len(tokens)} tokens")
    name = _SENTENCEPIECE_CLASSES.get(str(file.metadata.get("general.architecture")), "LlamaTokenizer")
    if name == "GemmaTokenizer":
        tokens, scores = [_with_marks(token) for token in tokens], range(0, -len(tokens), -1)
    vocab = {token: index for index, token in enumerate(tokens)}
    named = dict(CLASSES[name].named) | _own_names(file, tokens)
    if named["unk_token"] not in vocab:
        raise CheckpointError(f"the GGUF file's vocabulary lacks the unknown token {named['unk_token']!r}")
    build = CLASSES[name].build
    assert build is not None, "Llama's and Gemma's classes are over merges"
    try:
        built = build(vocab, _merges_of(vocab, dict(zip(tokens, scores, strict=True))), named)
    except Exception as error:  # the binding raises bare Exception
        raise CheckpointError(f"no tokenizer can be made of the GGUF file's vocabulary: {error}") from error
    return built, [token for token in named.values() if token in vocab]


def _with_marks(token: str) -> str:
    """Gemma's files spell a run of spaces as spaces."""
    return _SPACE * len(token) if " " in token and not token.strip() else token


def _own_names(file: GgufFile, tokens: Sequence[str]) -> dict[str, str]:
    """The special tokens that the file names."""
    found = {name: file.metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in _NAMED_TOKENS.items()}
    return {
        name: tokens[token_id]
        for name, token_id in found.items()
        if isinstance(token_id, int) and 0 <= token_id < len(tokens)
    }


def _merges_of(vocab: Mapping[str, int], scores: Mapping[str, float]) -> list[tuple[str, str]]:
    """Every pair of tokens that spells a token; higher scores first, then longer left parts."""
    merges = []
    for token, score in scores.items():
        for split in range(len(token) - 1, 0, -1):
            left, right = token[:split], token[split:]
            if left in vocab and right in vocab:
                merges.append((score, split, len(token) - split, left, right))
    merges.sort(key=lambda merge: merge[:3], reverse=True)
    return [(left, right) for *_, left, right in merges]
