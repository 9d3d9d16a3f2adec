"""Chat templates and special tokens of adapters' own: found, compared with the base's, and rendered."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import tokenizers
from tokenizers import AddedToken, models, pre_tokenizers
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

from app.engine.adapters.adapter_chat import AdapterTokenizerDedup, encode_chat, own_tokenizer
from app.engine.adapters.adapter_tokenizer import AdapterTokenizer, read_adapter_tokenizer, write_adapter_tokenizer
from app.engine.adapters.bounded_files import DEFAULT_LIMITS
from app.engine.adapters.formats.arrow import ArrowCard, read_card, write_card
from app.engine.adapters.formats.convert import write_peft_folder
from app.engine.adapters.formats.reading import read_adapter, read_raw_adapter
from app.engine.adapters.sandbox.packing import pack_adapter
from app.engine.adapters.sandbox.validator import Validator
from app.engine.api import LLM
from app.engine.config import CpuConfig, EngineConfig
from app.engine.errors import AdapterFormatError, AdapterMismatch, AdapterTooLarge, InvalidRequest
from app.engine.models.chat.chat_template_sandbox import ChatTemplateSandbox
from app.engine.models.checkpoint import load_checkpoint
from app.engine.models.tokenizers.tokenizer import NewToken, Tokenizer, load_tokenizer
from tests.engine.adapters.random_adapters import peft_config, peft_tensors, random_arrays, tiny_spec, write_peft
from tests.engine.checkpoints import save, tiny_model

BASE = "{% for m in messages %}{{ bos_token }}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
OWN = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}{{ eos_token }}{% endfor %}{{ '>' if add_generation_prompt }}"
)
CHAT = [{"role": "user", "content": "ab a"}]
SPEC = tiny_spec()
#: A base with the vocabulary of `fast`, whose answers end with </s>.
BYTES = replace(SPEC, vocab_size=260, eos_token_ids=(257,))


def fast() -> PreTrainedTokenizerFast:
    """A token per byte, and four special ones."""
    vocab = {char: index for index, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>", "<|im_end|>", "<pad>"])
    made = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    made.chat_template = BASE
    return made


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("base")
    fast().save_pretrained(folder)
    return load_tokenizer(folder)


@pytest.fixture(scope="module")
def process() -> Iterator[ChatTemplateSandbox]:
    made = ChatTemplateSandbox()
    yield made
    made.close()


def adapter(folder: Path, saved: PreTrainedTokenizerFast | None = None, /, **files: str) -> Path:
    write_peft(folder, peft_config(2, ["q_proj"]), peft_tensors(random_arrays(SPEC, 2, ["q_proj"])))
    if saved is not None:
        saved.save_pretrained(folder)
    for name, content in files.items():
        (folder / f"{name}.{'jinja' if name == 'chat_template' else 'json'}").write_text(content)
    return folder


def text_of(folder: Path) -> AdapterTokenizer:
    return AdapterTokenizer.from_json(read_adapter(folder, SPEC).card.text)


def test_the_bases_own_tokenizer_saved_along_says_nothing(tmp_path: Path, base: Tokenizer) -> None:
    folder = adapter(tmp_path, fast())
    assert text_of(folder).chat_template == BASE
    assert own_tokenizer(text_of(folder), base, BYTES) == AdapterTokenizer(None, {}, {})
    card = read_adapter(folder, SPEC).card
    assert AdapterTokenizerDedup(lambda: base, BYTES).strip_base(card).text == ""
    assert read_adapter(adapter(tmp_path / "bare"), SPEC).card.text == ""


@pytest.mark.parametrize("template", [OWN, BASE])
def test_a_prompt_is_the_one_that_transformers_makes_with_the_adapters_tokenizer(
    tmp_path: Path, base: Tokenizer, process: ChatTemplateSandbox, template: str
) -> None:
    tokenizer = fast()
    tokenizer.chat_template = template
    tokenizer.eos_token = "<|im_end|>"
    tokenizer.pad_token = "<pad>"
    own = own_tokenizer(text_of(adapter(tmp_path, tokenizer)), base, BYTES)
    ends = {"eos_token_id": [258, 257]}
    assert own == AdapterTokenizer(None if template == BASE else OWN, {"eos_token": "<|im_end|>"}, {}, ends)
    theirs = AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(
        CHAT, add_generation_prompt=True, return_dict=True
    )
    assert encode_chat(base, CHAT, own, process) == theirs["input_ids"]
    assert encode_chat(base, CHAT, AdapterTokenizer(None, {}, {}), process) != theirs["input_ids"]


@pytest.mark.parametrize("is_own", [False, True])
def test_a_requests_variables_reach_the_template_as_in_transformers(
    base: Tokenizer, process: ChatTemplateSandbox, is_own: bool
) -> None:
    template = BASE + "{% if enable_thinking is false %}<{{ tone | tojson }}>{% endif %}"
    variables = {"enable_thinking": False, "tone": ["dry", {"of": None}], "unheard_of": 1}
    tokenizer = fast()
    tokenizer.chat_template = template
    theirs = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=True, **variables)
    if is_own:
        served, own = base, AdapterTokenizer(template, {}, {})
    else:
        named = {"bos_token": "<s>", "eos_token": "</s>"}
        served, own = (
            Tokenizer(tokenizer.backend_tokenizer, named, {"default": template}),
            AdapterTokenizer(None, {}, {}),
        )
    assert encode_chat(served, CHAT, own, process, extra=variables) == theirs["input_ids"]
    assert encode_chat(served, CHAT, own, process) != theirs["input_ids"]
    with pytest.raises(InvalidRequest, match="'eos_token'"):
        encode_chat(served, CHAT, own, process, extra={"eos_token": "<pad>"})


@pytest.mark.parametrize(
    "files",
    [
        {"chat_template": OWN},
        {"tokenizer_config": json.dumps({"chat_template": OWN})},
        {"tokenizer_config": json.dumps({"chat_template": [{"name": "default", "template": OWN}]})},
    ],
    ids=str,
)
def test_a_template_is_found_wherever_trainers_save_it(tmp_path: Path, files: dict[str, str]) -> None:
    assert text_of(adapter(tmp_path, **files)).chat_template == OWN


#: A model with more rows than its tokenizer has tokens, as most have.
PADDED = replace(BYTES, name="tiny", vocab_size=288)


@pytest.mark.parametrize(
    ("files", "flags"),
    [
        ({"added_tokens": json.dumps({"<tool>": 260})}, ("normalized",)),
        (
            {
                "added_tokens": json.dumps({"<tool>": 260}),
                "tokenizer_config": json.dumps({"extra_special_tokens": ["<tool>"]}),
            },
            ("special",),
        ),
        (
            {
                "added_tokens": json.dumps({"<tool>": 260}),
                "special_tokens_map": json.dumps({"additional_special_tokens": [{"content": "<tool>"}]}),
            },
            ("special",),
        ),
        ({"tokenizer_config": json.dumps({"added_tokens_decoder": {"260": {"content": "<tool>"}}})}, ()),
        (
            {
                "tokenizer": json.dumps(
                    {"version": "1.0", "added_tokens": [{"id": 260, "content": "<tool>", "lstrip": True}], "model": {}}
                ),
                "tokenizer_config": json.dumps({"pad_token": "<tool>"}),
            },
            ("lstrip", "special"),
        ),
    ],
    ids=str,
)
def test_a_token_that_the_base_lacks_is_the_adapters_own(
    tmp_path: Path, base: Tokenizer, files: dict[str, str], flags: tuple[str, ...]
) -> None:
    own = own_tokenizer(text_of(adapter(tmp_path, **files)), base, PADDED)
    assert own.added_tokens == {"<tool>": NewToken(260, flags)}
    assert AdapterTokenizer.from_json(own.to_json()) == own
    (tmp_path / "again").mkdir()
    write_adapter_tokenizer(tmp_path / "again", own)
    assert read_adapter_tokenizer(tmp_path / "again", DEFAULT_LIMITS).added_tokens == own.added_tokens


def test_a_token_without_a_row_is_refused_by_name(tmp_path: Path, base: Tokenizer) -> None:
    own = text_of(adapter(tmp_path, added_tokens=json.dumps({"<tool>": 260})))
    with pytest.raises(AdapterMismatch, match="'<tool>' as id 260, and the embeddings of 'tiny' have 260 rows"):
        own_tokenizer(own, base, replace(BYTES, name="tiny"))
    later = text_of(adapter(tmp_path / "later", added_tokens=json.dumps({"<tool>": 263})))
    with pytest.raises(AdapterMismatch, match="'<tool>' as id 263, but added to the base's it gets 260"):
        own_tokenizer(later, base, PADDED)


def with_new_tokens(base: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """The tokenizer with two more tokens, one of them special, and a template that uses both."""
    base.add_tokens(["<call>", AddedToken("<end>", special=True)])
    base.chat_template = BASE + "{% if add_generation_prompt %}<call>{% endif %}<end>"
    return base


@pytest.mark.parametrize("text", ["a<call>b <end> é", "<call>", " <end><end>a", "no tokens of its own", "<s><calls>"])
def test_text_with_added_tokens_is_read_and_written_as_in_transformers(
    tmp_path: Path, base: Tokenizer, process: ChatTemplateSandbox, text: str
) -> None:
    own = own_tokenizer(text_of(adapter(tmp_path, with_new_tokens(fast()))), base, PADDED)
    theirs, ours = AutoTokenizer.from_pretrained(tmp_path), base.with_tokens(own.added_tokens)
    before = base.encode(text)
    token_ids = ours.encode(text)
    assert token_ids == theirs(text)["input_ids"]
    assert (token_ids == before) == ("<call>" not in text and "<end>" not in text)
    for skip in (False, True):
        assert ours.decode(token_ids, skip_special=skip) == theirs.decode(token_ids, skip_special_tokens=skip)
        decoder = ours.incremental_decoder(skip_special=skip)
        assert decoder.push(token_ids) + decoder.flush() == theirs.decode(token_ids, skip_special_tokens=skip)
    assert base.encode(text) == before
    assert base.token_id("<call>") is None
    assert (ours.vocab_size, base.vocab_size) == (262, 260)
    assert ours.token_bytes(260) == b"<call>"
    chat = [{"role": "user", "content": text}]
    written = encode_chat(ours, chat, own, process, split_special_tokens=False, add_generation_prompt=True)
    assert written == theirs.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
    plain = encode_chat(ours, chat, own, process, add_generation_prompt=True)
    assert plain.count(261) == 1, "special tokens in a message are plain text"
    assert plain.count(260) == written.count(260)


def test_added_tokens_of_another_kind_of_vocabulary_are_transformers(tmp_path: Path) -> None:
    """Words with a normalizer, whose added tokens may take the white space around them."""
    words = ["[UNK]", "a", "b", "##b", "[", "]", "x"]
    backend = tokenizers.Tokenizer(models.WordPiece({word: n for n, word in enumerate(words)}, unk_token="[UNK]"))
    backend.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=True)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = tokenizers.decoders.WordPiece()
    made = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]")
    made.save_pretrained(tmp_path / "base")
    base = load_tokenizer(tmp_path / "base")
    spaced, word = AddedToken("[Y]", lstrip=True, rstrip=True), AddedToken("ab", single_word=True)
    made.add_tokens([AddedToken("[X]", normalized=True), spaced, word])
    own = own_tokenizer(text_of(adapter(tmp_path, made)), base, replace(PADDED, vocab_size=10, eos_token_ids=(0,)))
    theirs, ours = AutoTokenizer.from_pretrained(tmp_path), base.with_tokens(own.added_tokens)
    for text in ("a [x] b", "a  [Y]  b", "aba ab xab", "[X][Y]ab"):
        assert ours.encode(text) == theirs(text)["input_ids"] != base.encode(text)
        decoder = ours.incremental_decoder()
        assert decoder.push(ours.encode(text)) + decoder.flush() == ours.decode(ours.encode(text))


def test_a_token_under_another_id_is_refused_by_name(tmp_path: Path, base: Tokenizer) -> None:
    folder = adapter(tmp_path, added_tokens=json.dumps({"<pad>": 7}))
    with pytest.raises(AdapterMismatch, match="'<pad>' as id 7 and the base's has it as 259"):
        own_tokenizer(text_of(folder), base, BYTES)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"chat_template": "{% for %}"}, "chat template does not parse"),
        ({"tokenizer_config": json.dumps({"chat_template": 7})}, "chat_template is 7, not text"),
        ({"tokenizer_config": "[]"}, "tokenizer_config.json"),
        ({"tokenizer_config": json.dumps({"added_tokens_decoder": [1]})}, "without its content"),
        ({"tokenizer_config": json.dumps({"added_tokens_decoder": {"x": {"content": "a"}}})}, "'a' as 'x'"),
        ({"added_tokens": json.dumps({"<tool>": "7"})}, "'<tool>' as '7'"),
        ({"added_tokens": json.dumps({"<tool>": 2**31})}, "'<tool>' as 2147483648, which is no token id"),
        ({"tokenizer": "{}"}, "does not begin with its added tokens"),
        ({"tokenizer": json.dumps({"added_tokens": 7})}, "does not begin with its added tokens"),
        ({"tokenizer_config": '{"chat_template": "x\\ud800"}'}, "half of a surrogate pair"),
    ],
)
def test_files_that_are_not_understood_are_refused(tmp_path: Path, files: dict[str, str], message: str) -> None:
    with pytest.raises(AdapterFormatError, match=message):
        read_adapter(adapter(tmp_path, **files), SPEC)


def test_the_text_comes_through_the_reading_process_and_changed_files_are_read_again(tmp_path: Path) -> None:
    validator = Validator()
    try:
        folder = adapter(tmp_path, chat_template="{% for %}")
        with pytest.raises(AdapterFormatError, match="does not parse"):
            validator.read(folder, SPEC)
        (folder / "chat_template.jinja").write_text(OWN)
        assert AdapterTokenizer.from_json(validator.read(folder, SPEC).card.text).chat_template == OWN
    finally:
        validator.close()


def test_the_text_survives_conversion(tmp_path: Path) -> None:
    tokenizer = fast()
    tokenizer.chat_template = OWN
    generation = '{"eos_token_id": 258, "temperature": 0.25, "do_sample": true}'
    stored = read_raw_adapter(adapter(tmp_path / "it", tokenizer, generation_config=generation), None)
    assert AdapterTokenizer.from_json(stored.text).generation["eos_token_id"] == [258]
    write_card(tmp_path / "it.lora.arrow", ArrowCard("it", stored, {}))
    card = read_card(tmp_path / "it.lora.arrow").raw
    write_peft_folder(tmp_path / "again", card)
    again = read_raw_adapter(tmp_path / "again", None)
    assert card.text == stored.text
    assert AdapterTokenizer.from_json(again.text) == AdapterTokenizer.from_json(stored.text)


@pytest.mark.parametrize(
    "text",
    ["[]", "{}", '{"chat_template": 1, "special_tokens": {}, "added_tokens": {}}']
    + [
        json.dumps({"chat_template": None, "special_tokens": {}, "added_tokens": {"<tool>": token}})
        for token in (7, [7], [7, "special"], [True, []], [7, ["unheard_of"]])
    ],
)
def test_a_card_with_another_text_is_refused(text: str) -> None:
    with pytest.raises(AdapterFormatError, match="metadata 'text' of the adapter's card"):
        AdapterTokenizer.from_json(text)


def test_generation_defaults_are_read_as_transformers_reads_them(tmp_path: Path) -> None:
    saved = GenerationConfig(
        eos_token_id=[258, 257], do_sample=True, temperature=0.5, top_p=0.9, top_k=7, min_p=0.1, max_new_tokens=9,
        repetition_penalty=1.2, pad_token_id=259,
    )  # fmt: skip
    saved.save_pretrained(tmp_path)
    found = text_of(adapter(tmp_path))
    theirs = GenerationConfig.from_pretrained(tmp_path)
    assert dict(found.generation) == {name: getattr(theirs, name) for name in found.generation}
    assert found.sampling == {
        "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "max_tokens": 9, "repetition_penalty": 1.2,
    }  # fmt: skip
    assert found.eos_token_ids == (258, 257)
    greedy = text_of(adapter(tmp_path / "greedy", generation_config='{"do_sample": false, "temperature": 0.5}'))
    assert greedy.sampling == {"temperature": 0.0}
    card = read_adapter(tmp_path, SPEC).card
    kept = AdapterTokenizer.from_json(AdapterTokenizerDedup(fast_base, BYTES).strip_base(card).text)
    assert kept == AdapterTokenizer(None, {}, {}, found.generation)


def fast_base() -> Tokenizer:
    return Tokenizer(fast().backend_tokenizer, {"bos_token": "<s>", "eos_token": "</s>"}, {"default": BASE})


@pytest.mark.parametrize(
    ("config", "eos_token", "ends"),
    [
        ({}, "</s>", None),
        ({"eos_token_id": 257}, "</s>", None),
        ({"eos_token_id": None}, "</s>", None),
        ({"eos_token_id": 258}, "</s>", [258]),
        ({"eos_token_id": [257, 258, 257]}, "</s>", [257, 258]),
        ({}, "<|im_end|>", [258, 257]),
        ({}, None, None),
        ({"eos_token_id": 259}, "<|im_end|>", [258, 259]),
        ({"eos_token_id": [257, 258]}, "<|im_end|>", [258, 257]),
    ],
)
def test_an_adapter_ends_answers_with_its_own_tokens(
    tmp_path: Path, base: Tokenizer, config: dict[str, object], eos_token: str | None, ends: list[int] | None
) -> None:
    """As transformers' trainer aligns a generation_config with a tokenizer whose eos_token differs."""
    files = {"generation_config": json.dumps(config), "tokenizer_config": json.dumps({"eos_token": eos_token})}
    own = own_tokenizer(text_of(adapter(tmp_path, **files)), base, replace(BYTES, eos_token_ids=(257,)))
    assert own.generation.get("eos_token_id") == ends
    assert own.eos_token_ids == (None if ends is None else tuple(ends))


def test_ends_that_the_base_cannot_write_are_refused_by_name(tmp_path: Path, base: Tokenizer) -> None:
    outside = text_of(adapter(tmp_path / "id", generation_config='{"eos_token_id": [257, 260]}'))
    unknown = text_of(adapter(tmp_path / "text", tokenizer_config='{"eos_token": "<end>"}'))
    with pytest.raises(AdapterMismatch, match="ends answers with token 260, but 'tiny' has 260 tokens"):
        own_tokenizer(outside, base, replace(BYTES, name="tiny"))
    with pytest.raises(AdapterMismatch, match="ends answers with '<end>', which is no token of the base's"):
        own_tokenizer(unknown, base, BYTES)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"eos_token_id": "</s>"}, "eos_token_id .* a token id or a list"),
        ({"eos_token_id": []}, "eos_token_id .* a token id or a list"),
        ({"eos_token_id": [1, -1]}, "eos_token_id .* a token id or a list"),
        ({"eos_token_id": True}, "eos_token_id .* a token id or a list"),
        ({"temperature": 3}, "temperature 3; it must be a number from 0 to 2"),
        ({"temperature": "1"}, "temperature '1'; it must be a number"),
        ({"top_k": 1.5}, "top_k 1.5; it must be a whole number"),
        ({"max_new_tokens": 0}, "max_new_tokens 0"),
        ({"do_sample": 1}, "do_sample 1; it must be true or false"),
    ],
)
def test_generation_defaults_that_no_request_could_have_are_refused(
    tmp_path: Path, config: dict[str, object], message: str
) -> None:
    with pytest.raises(AdapterFormatError, match=message):
        text_of(adapter(tmp_path, generation_config=json.dumps(config)))


def test_what_is_packed_is_settled_too(tmp_path: Path, base: Tokenizer) -> None:
    folder = adapter(tmp_path, fast(), chat_template=OWN)
    packed = AdapterTokenizerDedup(lambda: base, BYTES).strip_base_packed(pack_adapter(read_adapter(folder, SPEC)))
    assert AdapterTokenizer.from_json(packed.card.text) == AdapterTokenizer(OWN, {}, {})


@pytest.mark.parametrize("place", ["chat_template", "tokenizer_config"])
def test_a_template_is_bounded(tmp_path: Path, place: str) -> None:
    limit = 256 << 10
    for size in (limit, limit + 1):
        template = "x" * size
        text = template if place == "chat_template" else json.dumps({"chat_template": template})
        folder = adapter(tmp_path, **{place: text})
        if size == limit:
            assert text_of(folder).chat_template == template
        else:
            with pytest.raises(AdapterTooLarge, match="262144"):
                read_adapter(folder, SPEC)


def test_what_every_ingress_would_hold_is_bounded(tmp_path: Path, base: Tokenizer) -> None:
    config = json.dumps({"bos_token": "x" * (256 << 10)})
    folder = adapter(tmp_path, chat_template="{{ bos_token }}", tokenizer_config=config)
    with pytest.raises(AdapterTooLarge, match="at most 262144 are served"):
        AdapterTokenizerDedup(lambda: base, BYTES).strip_base(read_adapter(folder, SPEC).card)


def test_the_python_api_writes_an_adapters_prompt_with_its_template(tmp_path: Path) -> None:
    model = save(tiny_model("llama"), tmp_path / "model")
    fast().save_pretrained(model)
    spec = load_checkpoint(model).spec
    folder = write_peft(tmp_path / "it", peft_config(2, ["q_proj"]), peft_tensors(random_arrays(spec, 2, ["q_proj"])))
    (folder / "chat_template.jinja").write_text(OWN)
    config = EngineConfig(cpu=CpuConfig(num_threads=1), num_kv_blocks=16, lora_pool_rows=16)
    with LLM(model, config) as llm:
        plain: list[int] = llm.chat_prompt("ab a")
        own = llm.chat_prompt("ab a", adapter=folder)
        assert llm.tokenizer.decode(plain, skip_special=False) == "<s>user: ab a</s>"
        assert llm.tokenizer.decode(own, skip_special=False) == "[user] ab a</s>>"
