"""A tokenizer of few tokens, with which a tiny random model can write JSON."""

from __future__ import annotations

import functools

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from app.engine.structured_output.backend_guidance import Vocabulary

SPECIAL = ("<unk>", "<s>", "</s>")
EOS = 2
_PAIRS = ('{"', '":', '",', "[]", "{}", '"}', "tr", "ue", "fa", "ls", "nu", "ll", "12", "00", "]}", "}}", "ab", "na")


@functools.cache
def tiny_tokenizer(vocab_size: int = 120) -> str:
    """tokenizer.json of special tokens, printable ASCII, a newline and pairs of it."""
    alphabet = [chr(code) if code != 32 else "Ġ" for code in range(32, 127)] + ["Ċ"]
    vocab = {token: index for index, token in enumerate((*SPECIAL, *alphabet))}
    pairs = _PAIRS[: vocab_size - len(vocab)]
    for pair in pairs:
        vocab[pair] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab, [(pair[0], pair[1]) for pair in pairs], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    return str(tokenizer.to_str())


def tiny_vocabulary(vocab_size: int = 120) -> Vocabulary:
    return Vocabulary(tiny_tokenizer(vocab_size), vocab_size, [EOS])


def text_of(token_ids: list[int]) -> str:
    return str(Tokenizer.from_str(tiny_tokenizer()).decode(token_ids))


def ids_of(text: str) -> list[int]:
    return list(Tokenizer.from_str(tiny_tokenizer()).encode(text).ids)
