"""Token ids, text and chat prompts, beside transformers on the same files."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.integrations.gguf import convert_gguf_tokenizer, get_gguf_tokenizer

from app.engine.errors import CheckpointError, ContextOverflow, InvalidRequest
from app.engine.models.gguf.gguf_file import read_gguf
from app.engine.models.tokenizers.gguf_tokenizer import tokenizer_from_gguf
from app.engine.models.tokenizers.tokenizer import Tokenizer, load_tokenizer
from tests.budgets import examples
from tests.engine.models.lines import random_lines
from tests.seeds import any_seed


@pytest.fixture(scope="module")
def demo(demo_gguf: Path) -> Tokenizer:
    return load_tokenizer(demo_gguf)


@pytest.fixture(scope="module")
def known_bytes(demo: Tokenizer) -> frozenset[int]:
    """Bytes the demo vocabulary has a token for; a dozen have none, and are dropped as transformers drops them."""
    tokens = (demo.token_bytes(token_id) for token_id in range(demo.vocab_size))
    return frozenset(token[0] for token in tokens if len(token) == 1)


def known_part(text: str, known_bytes: frozenset[int]) -> str:
    return "".join(char for char in text if known_bytes.issuperset(char.encode()))


@pytest.fixture(scope="module")
def reference(demo_gguf: Path) -> Any:
    return AutoTokenizer.from_pretrained(demo_gguf.parent, gguf_file=demo_gguf.name)


def test_ids_equal_transformers_over_mixed_lines(demo: Tokenizer, reference: Any) -> None:
    seed = any_seed()
    lines = random_lines(4000, seed)
    for add_special_tokens in (True, False):
        wanted = reference(lines, add_special_tokens=add_special_tokens)["input_ids"]
        for line, ids in zip(lines, wanted, strict=True):
            assert demo.encode(line, add_special_tokens=add_special_tokens) == ids, (seed, line)
    assert sum(len(ids) for ids in wanted) > 50_000
    assert any(2 in ids for ids in wanted)  # the special strings did become special tokens


def test_ids_of_a_long_text_equal_transformers(demo: Tokenizer, reference: Any) -> None:
    seed = any_seed()
    text = "\n".join(random_lines(1000, seed))
    assert len(text) > 20_000
    assert demo.encode(text) == reference(text)["input_ids"], seed


def test_text_equals_transformers(demo: Tokenizer, reference: Any) -> None:
    seed = any_seed()
    num_equal = 0
    for line in random_lines(400, seed):
        ids = demo.encode(line)
        text = demo.decode(ids, skip_special=False)
        assert text == reference.decode(ids), (seed, line)
        num_equal += text == line
        assert demo.decode(ids) == reference.decode(ids, skip_special_tokens=True), (seed, line)
    assert num_equal > 200, "most lines come back as they were; bytes that no token has do not"


@pytest.mark.parametrize("text", ["", " ", "<|im_end|>", "a<|im_start|>b", "<|im_end|><|im_end|>"])
def test_special_strings_are_text_unless_allowed(demo: Tokenizer, text: str) -> None:
    ids = demo.encode(text, allow_special=False)
    assert not demo.special_ids.intersection(ids)
    assert demo.decode(ids, skip_special=False) == text
    assert demo.decode(ids, skip_special=True) == text
    assert bool(demo.special_ids.intersection(demo.encode(text))) == ("<|" in text)


def test_special_ids_of_the_demo_model(demo: Tokenizer) -> None:
    assert (demo.bos_token_id, demo.eos_token_id, demo.vocab_size) == (1, 2, 49152)
    assert demo.special_ids == frozenset(range(17))


def test_a_lone_surrogate_is_the_callers_mistake(demo: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match="surrogate at index 3"):
        demo.encode("abc\ud800")


def test_a_long_text_lets_other_threads_run(demo: Tokenizer) -> None:
    thread = threading.Thread(target=demo.encode, args=("The quick brown fox jumps over the lazy dog. " * 20_000,))
    num_turns = 0
    thread.start()
    while thread.is_alive():
        time.sleep(0.001)
        num_turns += 1
    assert num_turns > 10, "one or two, if it stops all others while it takes a second"


def streamed(tokenizer: Tokenizer, pieces: Sequence[Sequence[int]], skip_special: bool) -> str:
    decoder = tokenizer.incremental_decoder(skip_special=skip_special)
    return "".join([decoder.push(piece) for piece in pieces]) + decoder.flush()


@settings(max_examples=examples(300), deadline=None)
@given(data=st.data())
def test_streamed_text_equals_whole_text(demo: Tokenizer, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, demo.vocab_size + 3), max_size=40))  # any bytes, mostly no UTF-8
    ids += demo.encode(data.draw(st.text(max_size=30)))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=8)))
    pieces = [ids[a:b] for a, b in zip([0, *cuts], [*cuts, len(ids)], strict=True)]
    for skip_special in (True, False):
        assert streamed(demo, pieces, skip_special) == demo.decode(ids, skip_special=skip_special)


@settings(max_examples=examples(200), deadline=None)
@given(text=st.text(max_size=40))
def test_no_character_is_ever_cut(demo: Tokenizer, known_bytes: frozenset[int], text: str) -> None:
    text = known_part(text, known_bytes)
    decoder, seen = demo.incremental_decoder(), ""
    for token_id in demo.encode(text, allow_special=False):
        seen += decoder.push([token_id])
        assert text.startswith(seen)
    assert seen + decoder.flush() == text


def test_an_unfinished_character_is_replaced_at_the_end(demo: Tokenizer) -> None:
    ids = demo.encode("🎉")
    assert len(ids) > 1
    decoder = demo.incremental_decoder()
    assert decoder.push(ids[:-1]) == ""
    assert decoder.flush() == "\ufffd"
    assert decoder.push(ids) == "🎉"  # flushed means empty


def test_token_bytes_join_to_the_text(demo: Tokenizer, known_bytes: frozenset[int]) -> None:
    text = known_part("".join(random_lines(20, any_seed())), known_bytes)
    assert b"".join(demo.token_bytes(i) for i in demo.encode(text)) == text.encode()
    assert demo.token_bytes(10**7) == b""


CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "hi"}],
    [{"role": "system", "content": "  be brief \n"}, {"role": "user", "content": "你好 <b>&amp;</b>\n\n"}],
    [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "<|im_end|>"},
    ],
]


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_prompts_equal_transformers(
    demo: Tokenizer, reference: Any, chat: list[dict[str, Any]], add_generation_prompt: bool
) -> None:
    text = demo.render_chat(chat, add_generation_prompt=add_generation_prompt)
    options = {"add_generation_prompt": add_generation_prompt}
    assert text == reference.apply_chat_template(chat, tokenize=False, **options)
    ids = reference.apply_chat_template(chat, tokenize=True, return_dict=True, **options)["input_ids"]
    assert demo.encode(text, add_special_tokens=False) == ids


CORPUS = [
    "The quick brown fox jumps over the lazy dog 1234567 times.",
    "def f(x):\n    return x + 1\n\n\n",
    "你好，世界 🎉 naïve Straße",
] * 20


def small_byte_level() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=["<|endoftext|>", "<|bos|>", "<|eos|>"],
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.decoder = decoders.ByteLevel()
    return backend


def write_gguf_tokenizer(path: Path, **changes: Any) -> None:
    """A GGUF file with a small vocabulary, some tokens of every kind, and no tensors."""
    model = json.loads(small_byte_level().to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    types = [3] * 3 + [1] * (len(tokens) - 3)
    tokens += ["<think>", "has space", "<control with space>"]
    types += [4, 4, 3]
    values: dict[str, Any] = {"model": "gpt2", "pre": "gpt-2", "bos": 1, "eos": 2, "add_bos": False, "add_eos": False}
    values |= {"tokens": tokens, "types": types, **changes}
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(values["model"])
    if values["pre"] is not None:
        writer.add_tokenizer_pre(values["pre"])
    writer.add_token_list(values["tokens"])
    writer.add_token_types(values["types"])
    writer.add_token_merges([" ".join(pair) for pair in model["merges"]])
    writer.add_bos_token_id(values["bos"])
    writer.add_eos_token_id(values["eos"])
    writer.add_add_bos_token(values["add_bos"])
    writer.add_add_eos_token(values["add_eos"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "llama-bpe", "qwen2", "tekken"])
def test_every_pre_tokenizer_splits_as_transformers_does(pre: str, tmp_path: Path) -> None:
    write_gguf_tokenizer(tmp_path / "t.gguf", pre=pre)
    architecture, tokenizer_dict, _ = get_gguf_tokenizer(str(tmp_path / "t.gguf"))
    wanted, _ = convert_gguf_tokenizer(architecture, tokenizer_dict)
    ours = load_tokenizer(tmp_path / "t.gguf")
    seed = any_seed()
    for line in [*random_lines(500, seed), "a<think>b</think>", "has space", "<control with space>"]:
        assert ours.encode(line) == wanted.encode(line).ids, (seed, line)
        assert ours.decode(ours.encode(line), skip_special=False) == line


def test_gpt_4o_splits_as_openai_publishes_it(tmp_path: Path) -> None:
    write_gguf_tokenizer(tmp_path / "t.gguf", pre="gpt-4o")
    backend = tokenizer_from_gguf(read_gguf(tmp_path / "t.gguf"))
    text = "HelloWORLDs don't GO'LL 12345 a/b//\n  x\u0301y\t!?\r\n"
    wanted = [
        "Hello",
        "WORLDs",
        " don't",
        " GO'LL",
        " ",
        "123",
        "45",
        " a",
        "/b",
        "//\n",
        " ",
        " x\u0301y",
        "\t",
        "!?\r\n",
    ]
    assert backend.pre_tokenizer is not None
    pieces = [text[start:end] for _, (start, end) in backend.pre_tokenizer.pre_tokenize_str(text)]
    assert pieces == wanted


@pytest.mark.parametrize(("add_bos", "add_eos"), [(True, False), (False, True), (True, True)])
def test_bos_and_eos_are_added_where_the_file_asks(add_bos: bool, add_eos: bool, tmp_path: Path) -> None:
    write_gguf_tokenizer(tmp_path / "t.gguf", add_bos=add_bos, add_eos=add_eos)
    tokenizer = load_tokenizer(tmp_path / "t.gguf")
    bare = tokenizer.encode("fox", add_special_tokens=False)
    assert tokenizer.encode("fox") == [1] * add_bos + bare + [2] * add_eos


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "rwkv"}, "'rwkv' is not supported.*tokenizer.json"),
        ({"model": "llama"}, "'gpt-2' does not go with tokenizer 'llama'"),
        ({"pre": "chameleon"}, "chameleon"),
        ({"pre": None}, "None is not known"),
        ({"eos": 10**6}, "eos_token_id is 1000000"),
        ({"types": [1, 2]}, "token_type has 2 entries"),
        ({"tokens": ["a", "b", "c"], "types": [1] * 3}, "merges do not fit"),
    ],
)
def test_a_gguf_tokenizer_not_understood_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    write_gguf_tokenizer(tmp_path / "t.gguf", **changes)
    with pytest.raises(CheckpointError, match=message):
        load_tokenizer(tmp_path / "t.gguf")


def byte_fallback() -> tokenizers.Tokenizer:
    """Llama-2's kind: spaces as U+2581, unknown characters as bytes."""
    backend = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=340, show_progress=False, special_tokens=special)
    backend.train_from_iterator(["The quick brown fox jumps over the lazy dog"] * 5, trainer)
    content = json.loads(backend.to_str())
    content["added_tokens"] = content["added_tokens"][:3]
    backend = tokenizers.Tokenizer.from_str(json.dumps(content))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return backend


@pytest.fixture(scope="module", params=["byte-level", "byte-fallback"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    backend = small_byte_level() if request.param == "byte-level" else byte_fallback()
    names = ("<|bos|>", "<|eos|>") if request.param == "byte-level" else ("<s>", "</s>")
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=names[0], eos_token=names[1])
    fast.chat_template = "{% for m in messages %}{{ bos_token + m['content'] + eos_token }}{% endfor %}"
    fast.save_pretrained(path)
    return path


def test_a_folder_equals_transformers(folder: Path) -> None:
    ours, theirs = load_tokenizer(folder), PreTrainedTokenizerFast.from_pretrained(folder)
    assert (ours.bos_token_id, ours.eos_token_id) == (theirs.bos_token_id, theirs.eos_token_id)
    seed = any_seed()
    for line in random_lines(300, seed):
        ids = ours.encode(line)
        assert ids == theirs(line)["input_ids"], (seed, line)
        assert ours.decode(ids, skip_special=False) == theirs.decode(ids), (seed, line)
        assert streamed(ours, [[i] for i in ids], True) == ours.decode(ids), (seed, line)
    chat = [{"role": "user", "content": "x"}]
    assert ours.render_chat(chat) == theirs.apply_chat_template(chat, tokenize=False)


@pytest.mark.parametrize("special", [True, False])
def test_tokens_that_only_the_configuration_has_are_added_as_transformers_does(
    folder: Path, tmp_path: Path, special: bool
) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    first = load_tokenizer(folder).vocab_size
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": special}
    config["added_tokens_decoder"] = {
        str(first + index): {"content": content, **flags} for index, content in enumerate(["<|im_start|>", "<tool>"])
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    ours, theirs = load_tokenizer(tmp_path), PreTrainedTokenizerFast.from_pretrained(tmp_path)
    for text in ("<|im_start|>user\nThe quick<tool> fox", "<tool><tool", "<|im_start|> <|im_start|>"):
        ids = ours.encode(text)
        assert ids == theirs(text)["input_ids"]
        assert not {first, first + 1}.isdisjoint(ids)
        for skip in (True, False):
            assert ours.decode(ids, skip_special=skip) == theirs.decode(ids, skip_special_tokens=skip)
    config["added_tokens_decoder"] = {str(first + 1): {"content": "<tool>", **flags}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=f"<tool>' as id {first + 1}"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("listed", [[1], "x", {"x": {"content": "a"}}, {"1": "a"}, {"1": {}}, {"1": {"text": "a"}}])
def test_listed_tokens_that_are_not_understood_are_refused(folder: Path, tmp_path: Path, listed: object) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": listed}))
    with pytest.raises(CheckpointError, match="added_tokens_decoder"):
        load_tokenizer(tmp_path)


@settings(max_examples=examples(100), deadline=None)
@given(data=st.data())
def test_any_ids_stream_without_growing(folder: Path, data: st.DataObject) -> None:
    tokenizer = load_tokenizer(folder)
    decoder = tokenizer.incremental_decoder(skip_special=False)
    for token_id in data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=80)):
        decoder.push([token_id])
        assert len(getattr(decoder, "_ids", ())) <= 32
    decoder.flush()


def test_what_a_folder_lacks_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_tokenizer(tmp_path)
    small_byte_level().save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    with pytest.raises(InvalidRequest, match="no chat template"):
        tokenizer.render_chat([{"role": "user", "content": "x"}])


def test_a_text_of_far_too_many_tokens_is_refused_by_its_first_pieces(
    demo: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each combining character is two tokens or more, so the longest token says nothing about such a text."""
    text, max_tokens = "\u0301" * 2_000_000, 200_000
    lengths: list[int] = []
    encode = tokenizers.Tokenizer.encode_batch_fast

    class Backend:
        def encode_batch_fast(self, texts: list[str], **options: bool) -> list[tokenizers.Encoding]:
            lengths.extend(map(len, texts))
            return encode(backend, texts, **options)

    backend = demo._backend
    monkeypatch.setattr(demo, "_backend", Backend())
    with pytest.raises(ContextOverflow, match="has more than 200000 tokens in its first"):
        demo.encode(text, max_tokens=max_tokens)
    assert sum(lengths) <= max_tokens + max_tokens // 16 + 32_768


def test_a_long_text_that_fits_is_read_as_a_whole(demo: Tokenizer) -> None:
    text = "The quick brown fox jumps over the lazy dog. " * 4000
    assert demo.encode(text, max_tokens=60_000) == demo.encode(text)
