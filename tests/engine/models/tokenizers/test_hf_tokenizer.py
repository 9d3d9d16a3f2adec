"""Tokenizers of folders, beside the one that transformers assembles from the same files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import transformers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer
from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES, tokenizer_class_from_name

from app.engine.errors import CheckpointError
from app.engine.models.tokenizers.hf_tokenizer_classes import CLASSES, PLAIN, UNSUPPORTED_CLASSES
from app.engine.models.tokenizers.tokenizer import load_tokenizer
from tests.budgets import examples
from tests.engine.models.lines import random_lines
from tests.seeds import any_seed

CHAT = [{"role": "user", "content": "hi a\n\n1"}]
TEMPLATE = "{% for m in messages %}{{ bos_token }}[INST] {{ m.content }} [/INST]{{ eos_token }}{% endfor %}"
CORPUS = [
    "The quick brown fox jumps over the lazy dog 1234567 times.",
    "def f(x):\n    return 12 + 34\n\n\n",
    "naïve 你好",
]
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _split(pattern: str) -> pre_tokenizers.PreTokenizer:
    parts = [pre_tokenizers.Split(Regex(pattern), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    return pre_tokenizers.Sequence(parts)


BYTE_LEVEL: dict[str, pre_tokenizers.PreTokenizer] = {
    "gpt2": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "digits": pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    ),
    "llama3": _split(LLAMA3),
}


def _byte_level(kind: str) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = BYTE_LEVEL[kind]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<|endoftext|>", "<s>", "</s>", "<unk>"]
    trainer = trainers.BpeTrainer(
        vocab_size=420, show_progress=False, initial_alphabet=alphabet, special_tokens=special
    )
    backend.train_from_iterator(CORPUS * 5, trainer)
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentence(kind: str) -> tokenizers.Tokenizer:
    """SentencePiece's kind, as converted for Llama 2 ("prepend"), Mistral ("metaspace") and Gemma ("replace")."""
    special = ["<unk>", "<s>", "</s>", "<bos>", "<eos>", "<pad>", "<mask>", *(f"<0x{byte:02X}>" for byte in range(256))]
    backend = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    backend.normalizer = normalizers.Replace(" ", "▁")
    trainer = trainers.BpeTrainer(vocab_size=420, show_progress=False, special_tokens=special)
    backend.train_from_iterator(CORPUS * 5, trainer)
    content = json.loads(backend.to_str())
    content["added_tokens"] = content["added_tokens"][:7]
    backend = tokenizers.Tokenizer.from_str(json.dumps(content))
    if kind == "prepend":
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    if kind == "metaspace":
        backend.normalizer = None
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(parts[: 3 if kind == "replace" else 4])
    bos = "<bos>" if kind == "replace" else "<s>"
    backend.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, backend.token_to_id(bos))]
    )
    return backend


def _charsmap(becomes: Mapping[str, str]) -> bytes:
    """SentencePiece's table of characters, as darts-clone lays it out: a trie in units of 32 bits, then the texts."""
    trie: dict[int, Any] = {}
    texts = b""
    for character, text in becomes.items():
        node = trie
        for byte in character.encode():
            node = node.setdefault(byte, {})
        node[0] = len(texts)
        texts += text.encode() + b"\0"
    units: dict[int, int] = {}

    def place(node: dict[int, Any], at: int, label: int) -> None:
        base = 256 * (1 + len(bases))
        bases.append(base)
        units[at] = (at ^ base) << 10 | (0 in node) << 8 | label
        for byte, child in node.items():
            if byte == 0:
                units[base] = child | 1 << 31
            else:
                place(child, base ^ byte, byte)

    bases: list[int] = []
    place(trie, 0, 0)
    array = np.zeros(256 * (1 + len(bases)), "<u4")
    array[list(units)] = list(units.values())
    return len(array.tobytes()).to_bytes(4, "little") + array.tobytes() + texts


def _unigram(kind: str) -> tokenizers.Tokenizer:
    """SentencePiece's kind with scores, as converted for XLM-RoBERTa and CamemBERT."""
    special = {
        "xlm-roberta": ["<s>", "<pad>", "</s>", "<unk>"],
        "camembert": ["<s>NOTUSED", "<pad>", "</s>NOTUSED", "<unk>", "<unk>NOTUSED", "<s>", "</s>"],
    }[kind]
    trained = tokenizers.Tokenizer(models.Unigram())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=200, show_progress=False, unk_token="<unk>")
    trained.train_from_iterator(CORPUS * 5, trainer)
    pieces = [(token, score) for token, score in json.loads(trained.to_str())["model"]["vocab"] if token != "<unk>"]
    vocab = [*((token, 0.0) for token in special), *pieces, ("<mask>", 0.0)]
    backend = tokenizers.Tokenizer(models.Unigram(vocab, unk_id=3))
    backend.normalizer = normalizers.Sequence(
        [normalizers.Precompiled(CHARSMAP), normalizers.Replace(Regex(" {2,}"), " ")]
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens([*special, AddedToken("<mask>", lstrip=True, special=True)])
    around = [(token, backend.token_to_id(token)) for token in ("<s>", "</s>")]
    backend.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=around)
    return backend


#: Full-width letters become others, and a ligature two.
CHARSMAP = _charsmap({"Ａ": "A", "１": "1", "ﬁ": "fi", "ﬂ": "fl"})
BACKENDS = (
    {kind: _byte_level(kind) for kind in BYTE_LEVEL}
    | {kind: _sentence(kind) for kind in ("prepend", "metaspace", "replace")}
    | {kind: _unigram(kind) for kind in ("xlm-roberta", "camembert")}
)


def write(
    folder: Path, backend: str, config: Mapping[str, Any], model_type: str | None = None, **files: Mapping[str, Any]
) -> Path:
    BACKENDS[backend].save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if model_type is not None:
        (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def assert_equal(folder: Path, *texts: str, num_lines: int = examples(60)) -> None:
    """Ids, text, special tokens and prompts are transformers', over mixed lines and these texts."""
    ours, theirs = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    seed = any_seed()
    lines = [*random_lines(num_lines, seed), "\n\n1", "12", " a\n\nb", "e\u0301 12a", " <s>x </s> y", "a  b"]
    lines += ["Ａ１ ﬁx  the ﬂy\t １2", "The quick  <mask>,<mask> fox", "", *texts]
    for line in lines:
        for special in (True, False):
            ids = theirs.encode(line, add_special_tokens=special)
            assert ours.encode(line, add_special_tokens=special) == ids, (seed, line)
        assert ours.decode(ids, skip_special=False) == theirs.decode(ids), (seed, line)
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True), (seed, line)
    assert (ours.bos_token_id, ours.eos_token_id) == (theirs.bos_token_id, theirs.eos_token_id)
    assert ours.special_tokens == theirs.special_tokens_map
    if theirs.chat_template:
        text = ours.render_chat(CHAT, add_generation_prompt=False)
        assert text == theirs.apply_chat_template(CHAT, tokenize=False)
        ids = theirs.apply_chat_template(CHAT, tokenize=True, return_dict=True)["input_ids"]
        assert ours.encode(text, add_special_tokens=False) == ids


NAMED = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "chat_template": TEMPLATE}
#: (tokenizer.json, tokenizer_class, model_type, further keys of tokenizer_config.json)
CASES: list[tuple[str, str | None, str | None, dict[str, Any]]] = [
    *((kind, "GPT2Tokenizer", "llama", {}) for kind in BYTE_LEVEL),
    *((kind, "GPT2TokenizerFast", "llama", {"add_prefix_space": True}) for kind in BYTE_LEVEL),
    *((kind, "GPTNeoXTokenizer", "olmoe", {}) for kind in BYTE_LEVEL),
    *((kind, "GPTNeoXTokenizerFast", "llama", {"add_prefix_space": True}) for kind in BYTE_LEVEL),
    *(("llama3", None, "olmoe", keys) for keys in ({}, {"add_bos_token": True}, {"add_eos_token": True})),
    *((kind, "Qwen2Tokenizer", "qwen3", {}) for kind in BYTE_LEVEL),
    *((kind, "Qwen2TokenizerFast", "llama", {"add_prefix_space": True}) for kind in BYTE_LEVEL),
    *((kind, "PreTrainedTokenizerFast", "qwen2", {}) for kind in BYTE_LEVEL),
    *((kind, "PreTrainedTokenizerFast", "qwen3", {}) for kind in BYTE_LEVEL),
    *((kind, "PreTrainedTokenizerFast", "llama", {}) for kind in BYTE_LEVEL),
    ("llama3", "LlamaTokenizerFast", "llama", {}),
    ("llama3", "LlamaTokenizerFast", "qwen2", {}),
    ("llama3", None, "qwen3", {}),
    ("llama3", None, "llama", {}),
    ("gpt2", "NobodysTokenizer", "llama", {}),
    ("gpt2", "BloomTokenizerFast", "llama", {}),
    *(
        (kind, "LlamaTokenizer", "llama", keys)
        for kind in ("prepend", "metaspace")
        for keys in ({}, {"legacy": True}, {"legacy": False}, {"add_prefix_space": False})
    ),
    ("prepend", "LlamaTokenizerFast", "mistral", {"legacy": True}),
    ("prepend", "PreTrainedTokenizerFast", "llama", {}),
    ("prepend", "CodeLlamaTokenizer", "llama", {}),
    ("metaspace", "CodeLlamaTokenizerFast", "llama", {"add_prefix_space": False, "prefix_token": "▁<PRE>"}),
    ("gpt2", "RobertaTokenizer", "roberta", {}),
    ("digits", "RobertaTokenizerFast", "roberta", {"add_prefix_space": True}),
    ("llama3", "RobertaTokenizer", "llama", {"cls_token": "<|endoftext|>", "sep_token": "</s>"}),
    ("gpt2", None, "roberta", {}),
    *(
        (kind, name, kind, keys)
        for kind, name in (("xlm-roberta", "XLMRobertaTokenizer"), ("camembert", "CamembertTokenizer"))
        for keys in (
            {},
            {"add_prefix_space": False},
            {"mask_token": "<mask>"},
            {"bos_token": "<pad>"},
            {"added_tokens_decoder": {}},
        )
    ),
    ("xlm-roberta", None, "xlm-roberta", {}),
    ("camembert", None, "camembert", {}),
    ("xlm-roberta", "XLMRobertaTokenizerFast", "bert", {"unk_token": "</s>"}),
    ("camembert", "CamembertTokenizerFast", "bert", {"unk_token": "</s>"}),
    ("camembert", "XLMRobertaTokenizer", "xlm-roberta", {"additional_special_tokens": ["<tool>"]}),
    ("camembert", "CamembertTokenizer", "camembert", {"extra_special_tokens": ["<tool>"]}),
    ("xlm-roberta", "CamembertTokenizer", "camembert", {}),
    ("xlm-roberta", "PreTrainedTokenizerFast", "xlm-roberta", {}),
    ("replace", "GemmaTokenizer", "gemma3_text", {"bos_token": "<bos>", "eos_token": "<eos>"}),
    ("replace", "GemmaTokenizerFast", "gemma2", {}),
    ("prepend", None, "gemma", {"bos_token": "<bos>", "eos_token": "<eos>"}),
    ("replace", "PreTrainedTokenizerFast", "gemma2", {}),
    ("gpt2", "PreTrainedTokenizerFast", "llama", {"split_special_tokens": True}),
]


@pytest.mark.parametrize(("backend", "name", "model_type", "keys"), CASES)
def test_ids_are_those_of_the_class_that_transformers_chooses(
    tmp_path: Path, backend: str, name: str | None, model_type: str | None, keys: dict[str, Any]
) -> None:
    config = NAMED | keys | ({} if name is None else {"tokenizer_class": name})
    assert_equal(write(tmp_path, backend, config, model_type))


SIZE = BACKENDS["gpt2"].get_vocab_size()
PLAIN_CONFIG = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>"}
TOOL_TEMPLATE = "{{ tool_token }}{{ cls_token }}{{ messages[0].content }}{{ sep_token }}"
TOKEN_FILES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "special_tokens_map": (
        {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE},
        {"special_tokens_map": {"bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": True}}},
    ),
    "special_tokens_map beside listed tokens": (
        PLAIN_CONFIG | {"added_tokens_decoder": {}},
        {"special_tokens_map": {"eos_token": "</s>"}},
    ),
    "additional in special_tokens_map": (
        PLAIN_CONFIG,
        {"special_tokens_map": {"additional_special_tokens": ["<tool>"]}},
    ),
    "cls and sep in a template": (
        PLAIN_CONFIG | {"cls_token": "<s>", "sep_token": "</s>", "chat_template": TOOL_TEMPLATE},
        {},
    ),
    "a named extra token": (
        PLAIN_CONFIG | {"extra_special_tokens": {"tool_token": "<tool>"}, "chat_template": TOOL_TEMPLATE},
        {},
    ),
    "a token of the model's own name": (PLAIN_CONFIG | {"tool_token": "<tool>", "chat_template": TOOL_TEMPLATE}, {}),
    "additional_special_tokens": (PLAIN_CONFIG | {"additional_special_tokens": ["<tool>", "<b>"]}, {}),
    "extra_special_tokens": (PLAIN_CONFIG | {"extra_special_tokens": ["<tool>"]}, {}),
    "added_tokens": (PLAIN_CONFIG, {"added_tokens": {"<tool>": SIZE, "<b>": SIZE + 1}}),
    "added_tokens of a rebuilt class": (
        {"tokenizer_class": "GPT2Tokenizer", "eos_token": "</s>"},
        {"added_tokens": {"<tool>": SIZE}, "special_tokens_map": {"bos_token": "<s>", "pad_token": "<tool>"}},
    ),
    "an end that no file knows": (PLAIN_CONFIG | {"eos_token": "<gone>"}, {}),
    "a null in place of a class's default": (
        {"tokenizer_class": "Qwen2Tokenizer", "unk_token": None, "pad_token": None},
        {},
    ),
}


@pytest.mark.parametrize("name", TOKEN_FILES)
def test_tokens_are_found_in_the_files_in_which_transformers_finds_them(tmp_path: Path, name: str) -> None:
    config, files = TOKEN_FILES[name]
    assert_equal(write(tmp_path, "gpt2", config, **files), "a<tool>b", "<b> <tool></s> ", num_lines=10)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"added_tokens": {"<tool>": 500}}, f"<tool>' as id 500, but it gets id {SIZE}"),
        ({"added_tokens": {"<tool>": "x"}}, "added_tokens.json has '<tool>' as 'x'"),
        ({"special_tokens_map": {"bos_token": {"text": "<s>"}}}, "bos_token holds"),
    ],
)
def test_token_files_that_are_not_understood_are_refused(tmp_path: Path, files: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        load_tokenizer(write(tmp_path, "gpt2", PLAIN_CONFIG, **files))


@pytest.mark.parametrize(
    ("backend", "name", "key"),
    [
        ("gpt2", "Roberta", "cls_token"),
        ("camembert", "Camembert", "bos_token"),
        ("xlm-roberta", "XLMRoberta", "eos_token"),
    ],
)
def test_a_class_that_wraps_texts_needs_what_it_wraps_them_in(
    tmp_path: Path, backend: str, name: str, key: str
) -> None:
    with pytest.raises(CheckpointError, match=f"has no {key}"):
        load_tokenizer(write(tmp_path, backend, {"tokenizer_class": f"{name}Tokenizer", key: None}))


def test_a_class_over_another_kind_of_model_is_refused(tmp_path: Path) -> None:
    unigram = tokenizers.Tokenizer(models.Unigram([("<unk>", 0.0), ("a", -1.0)], unk_id=0))
    unigram.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "LlamaTokenizer"}))
    with pytest.raises(CheckpointError, match=r"'LlamaTokenizer' is byte-pair encoding .* 'Unigram'"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "XLMRobertaTokenizer"}))
    with pytest.raises(CheckpointError, match=r"no Unigram model that XLMRobertaTokenizer can be built from"):
        load_tokenizer(tmp_path)  # its unknown token is the fourth
    with pytest.raises(CheckpointError, match=r"'XLMRobertaTokenizer' is a Unigram model .* 'BPE'"):
        load_tokenizer(write(tmp_path, "gpt2", {"tokenizer_class": "XLMRobertaTokenizer"}))


def test_every_class_of_transformers_is_followed_plain_or_refused() -> None:
    """A class with an `__init__` of its own, or without the tokenizers library, is not what tokenizer.json says."""
    names = {name for name in TOKENIZER_MAPPING_NAMES.values() if name}
    names |= {name for name in dir(transformers) if name.endswith("Tokenizer")}
    names = {name.removesuffix("Fast") for name in names}
    base = tokenizer_class_from_name(PLAIN)
    for name in sorted(names - {"AutoTokenizer", "PreTrainedTokenizer", "BasicTokenizer", "WordpieceTokenizer"}):
        found = tokenizer_class_from_name(name)
        is_tokenizer = isinstance(found, type) and issubclass(found, transformers.PreTrainedTokenizerBase)
        if found is base or not is_tokenizer:
            continue
        rebuilds = not issubclass(found, base) or "__init__" in vars(found)
        assert rebuilds == (name in CLASSES or name in UNSUPPORTED_CLASSES), name


def test_a_class_that_is_not_followed_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"'T5Tokenizer'.*LlamaTokenizer.*PreTrainedTokenizerFast"):
        load_tokenizer(write(tmp_path, "gpt2", {"tokenizer_class": "T5TokenizerFast"}))


TOOLS = [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}]


@pytest.mark.parametrize("saved_again", [False, True])
def test_the_template_for_tools_is_chosen_where_there_is_one(tmp_path: Path, saved_again: bool) -> None:
    templates = [
        {"name": "default", "template": "{% for m in messages %}{{ m.content }}{% endfor %}"},
        {
            "name": "tool_use",
            "template": "tools: {{ tools | tojson }}{% for m in messages %}{{ m.content }}{% endfor %}",
        },
    ]
    folder = write(tmp_path, "gpt2", PLAIN_CONFIG | {"chat_template": templates})
    theirs = AutoTokenizer.from_pretrained(folder)
    if saved_again:
        folder = tmp_path / "again"
        theirs.save_pretrained(folder)
    ours = load_tokenizer(folder)
    for tools in (None, TOOLS):
        text = ours.render_chat(CHAT, tools=tools, add_generation_prompt=False)
        assert text == theirs.apply_chat_template(CHAT, tools=tools, tokenize=False)
        assert text.startswith("tools:") == (tools is not None)


def test_a_null_in_a_message_is_as_if_it_were_not_there(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m.name is defined }}{{ m.content }}{% endfor %}"
    folder = write(tmp_path, "gpt2", PLAIN_CONFIG | {"chat_template": template})
    chat = [{"role": "user", "content": "x", "name": None}, {"role": "assistant", "content": None}]
    text = load_tokenizer(folder).render_chat(chat, add_generation_prompt=False)
    assert text == AutoTokenizer.from_pretrained(folder).apply_chat_template(chat, tokenize=False)
