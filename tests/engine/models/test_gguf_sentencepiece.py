"""SentencePiece vocabularies in GGUF: small files written by the `gguf` package, beside transformers' reading."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest
import tokenizers
from tokenizers import models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer

from app.engine.errors import CheckpointError
from app.engine.models.tokenizers.tokenizer import load_tokenizer
from tests.engine.models.lines import random_lines
from tests.seeds import any_seed, rng

NORMAL, CONTROL, USER_DEFINED, BYTE = 1, 3, 4, 6
CORPUS = ["The quick brown fox jumps over the lazy dog 1234567 times.", "def f(x):\n    return x + 1\n", "naïve Straße"]
SPECIAL = {"gemma3": ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"], "llama": ["<unk>", "<s>", "</s>"]}


def pieces() -> list[str]:
    """Of a small vocabulary, spaces as U+2581."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.pre_tokenizer = pre_tokenizers.Split("▁", behavior="merged_with_next")
    trainer = trainers.BpeTrainer(vocab_size=160, show_progress=False)
    backend.train_from_iterator(CORPUS * 20, trainer)
    vocab = backend.get_vocab()
    return sorted(vocab, key=vocab.__getitem__)


def write_sentencepiece(path: Path, architecture: str, **changes: Any) -> list[str]:
    """The file, with tokens of every type and scores in no order; its tokens."""
    special = SPECIAL[architecture]
    entries = [(token, CONTROL) for token in special]
    entries += [(f"<0x{byte:02X}>", BYTE) for byte in range(256)]
    entries += [("\n\n", USER_DEFINED), ("  ", USER_DEFINED), ("<think>", USER_DEFINED), ("<turn>", CONTROL)]
    entries += [(piece, NORMAL) for piece in pieces() if piece != "\n\n"]
    tokens = [token for token, _ in entries]
    scores = rng().normal(size=len(tokens)).round(1).tolist()  # some are equal
    values: dict[str, Any] = {
        "tokens": tokens,
        "scores": scores,
        "pre": "default",
        "add_bos": True,
        "has_unknown": True,
    }
    values |= changes
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre(values["pre"])
    writer.add_token_list(values["tokens"])
    writer.add_token_scores(values["scores"])
    writer.add_token_types([kind for _, kind in entries][: len(values["tokens"])])
    for add, token in zip(
        (writer.add_unk_token_id, writer.add_bos_token_id, writer.add_eos_token_id),
        ("<unk>", *(("<bos>", "<eos>") if architecture == "gemma3" else ("<s>", "</s>"))),
        strict=True,
    ):
        if token != "<unk>" or values["has_unknown"]:
            add(tokens.index(token))
    if values["add_bos"] is not None:
        writer.add_add_bos_token(values["add_bos"])
    writer.add_chat_template("{{ bos_token }}{{ messages[0].content }}")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tokens


@pytest.mark.parametrize("architecture", SPECIAL)
def test_ids_and_text_equal_transformers(architecture: str, tmp_path: Path) -> None:
    write_sentencepiece(tmp_path / "t.gguf", architecture)
    wanted = AutoTokenizer.from_pretrained(tmp_path, gguf_file="t.gguf")
    ours = load_tokenizer(tmp_path / "t.gguf")
    seed = any_seed()
    lines = [*random_lines(500, seed), "a<think>b</think>", "The  quick\n\nfox\n\n\n", " lead ", "<turn>user", "🙂▁x"]
    for line in lines:
        for add_special_tokens in (True, False):
            ids = wanted(line, add_special_tokens=add_special_tokens)["input_ids"]
            assert ours.encode(line, add_special_tokens=add_special_tokens) == ids, (seed, line)
        assert ours.decode(ids) == wanted.decode(ids, skip_special_tokens=True), (seed, line)
    assert ours.render_chat([{"role": "user", "content": "hi"}]) == wanted.bos_token + "hi"


def test_words_become_their_tokens_and_what_has_none_bytes(tmp_path: Path) -> None:
    tokens = write_sentencepiece(tmp_path / "t.gguf", "gemma3")
    tokenizer = load_tokenizer(tmp_path / "t.gguf")
    assert tokenizer.encode("é<turn>") == [2, tokens.index("<0xC3>"), tokens.index("<0xA9>"), tokens.index("<turn>")]
    assert tokenizer.encode("x\n\n", add_special_tokens=False)[-1] == tokens.index("\n\n")
    decoder = tokenizer.incremental_decoder()
    text = "".join(decoder.push([token]) for token in tokenizer.encode("naïve 🙂 fox")) + decoder.flush()
    assert text == "naïve 🙂 fox"


@pytest.mark.parametrize(("add_bos", "has_bos"), [(True, True), (False, False), (None, True)])
def test_a_bos_is_added_unless_the_file_says_no(add_bos: bool | None, has_bos: bool, tmp_path: Path) -> None:
    write_sentencepiece(tmp_path / "t.gguf", "gemma3", add_bos=add_bos)
    assert (load_tokenizer(tmp_path / "t.gguf").encode("fox")[0] == 2) == has_bos


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scores": [0.0]}, r"scores has 1 entries for \d+ tokens"),
        ({"pre": "qwen2"}, "'qwen2' does not go with tokenizer 'llama'"),
        ({"tokens": ["a", "b", "c"], "scores": [0.0] * 3, "has_unknown": False}, "lacks the unknown token '<unk>'"),
        ({"tokens": ["<unk>", "a"], "scores": [0.0] * 2}, "eos_token_id is 2; the vocabulary has 2 tokens"),
    ],
)
def test_metadata_that_is_not_understood_is_named(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    write_sentencepiece(tmp_path / "t.gguf", "llama", **changes)
    with pytest.raises(CheckpointError, match=message):
        load_tokenizer(tmp_path / "t.gguf")
