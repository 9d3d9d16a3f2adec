"""Text from a stream: its pieces joined are the text of all ids at once, broken bytes included."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from app.engine.models.tokenizers.tokenizer import Tokenizer, load_tokenizer
from tests.budgets import examples


def _byte(value: int) -> int:
    return 3 + value


A, SPACED_A = 260, 261


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Llama 2's kind: "<0x0A>" and its like stand for bytes."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{value:02X}>": _byte(value) for value in range(256)}
    vocab |= {"▁": 259, "a": A, "▁a": SPACED_A}
    model = models.BPE(vocab=vocab, merges=[("▁", "a")], byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<s>", "</s>"])
    folder = tmp_path_factory.mktemp("fallback")
    backend.save(str(folder / "tokenizer.json"))
    return load_tokenizer(folder)


def streamed(tokenizer: Tokenizer, ids: list[int], *, skip_special: bool = True) -> str:
    decoder = tokenizer.incremental_decoder(skip_special=skip_special)
    return "".join([decoder.push([token_id]) for token_id in ids]) + decoder.flush()


BROKEN = {
    "an emoji cut after a newline": [A, _byte(0x0A), _byte(0xF0), _byte(0x9F)],
    "a whole character, then a broken byte": [_byte(0xC3), _byte(0xA9), _byte(0xF0), A],
    "a character cut in the middle of a text": [
        A,
        _byte(0x0A),
        *map(_byte, "😀".encode()),
        _byte(0x0A),
        _byte(0xE2),
        A,
    ],
    "more broken bytes than any character has": [*[_byte(0xFF)] * 50, A, SPACED_A],
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_bytes_stream_as_they_are_decoded(tokenizer: Tokenizer, name: str) -> None:
    assert "\ufffd" in tokenizer.decode(BROKEN[name])
    assert streamed(tokenizer, BROKEN[name]) == tokenizer.decode(BROKEN[name])


def test_whole_bytes_come_with_the_token_after_them(tokenizer: Tokenizer) -> None:
    decoder = tokenizer.incremental_decoder()
    assert [decoder.push([i]) for i in [A, *map(_byte, "é\n".encode()), A]] == ["a", "", "", "", "é\na"]


@settings(max_examples=examples(300), deadline=None)
@given(
    ids=st.lists(st.sampled_from([A, SPACED_A, 1, 259, *map(_byte, "é😀\n".encode())]), max_size=40),
    skip_special=st.booleans(),
)
def test_any_run_of_bytes_streams_as_it_is_decoded(tokenizer: Tokenizer, ids: list[int], skip_special: bool) -> None:
    assert streamed(tokenizer, ids, skip_special=skip_special) == tokenizer.decode(ids, skip_special=skip_special)


def test_an_added_token_that_the_normaliser_changes_streams_as_it_is_decoded(tmp_path: Path) -> None:
    vocab = {char: index for index, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.normalizer = normalizers.Lowercase()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken("TOK", normalized=True)])
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({}))
    ours = load_tokenizer(tmp_path)
    ids = ours.encode("a TOK b")
    assert 256 in ids
    assert streamed(ours, ids) == ours.decode(ids)
