"""Tokenizer parts that transformers builds from the tokenizer's class instead of reading them from tokenizer.json.

transformers' `AutoTokenizer` (5.x) chooses a class for a folder; its normaliser, pre-tokenizer, model settings and
decoder replace those of tokenizer.json. Adapters are trained with that class, so their prompts need its ids. A class
that is rebuilt in a way not implemented here is refused by name.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers

from app.engine.errors import CheckpointError

PLAIN = "TokenizersBackend"
_QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
#: transformers' class for a model_type, if any; a class that a file names takes precedence, except over
#: `_ALWAYS`.
_OF_MODEL_TYPE = {
    "mistral": PLAIN,
    "mixtral": PLAIN,
    "qwen2": "Qwen2Tokenizer",
    "qwen2_moe": "Qwen2Tokenizer",
    "qwen3": "Qwen2Tokenizer",
    "qwen3_moe": "Qwen2Tokenizer",
    "gemma": "GemmaTokenizer",
    "gemma2": "GemmaTokenizer",
    "gemma3": "GemmaTokenizer",
    "gemma3_text": "GemmaTokenizer",
    "olmoe": "GPTNeoXTokenizer",
    "bert": "BertTokenizer",
    "roberta": "RobertaTokenizer",
    "xlm-roberta": "XLMRobertaTokenizer",
    "camembert": "CamembertTokenizer",
}
_ALWAYS = frozenset({"qwen2"})
#: Classes that transformers rebuilds, or computes without the tokenizers library, in ways not implemented here.
_OTHERS = """
    AlbertTokenizer BartTokenizer BarthezTokenizer BartphoTokenizer BertGenerationTokenizer BertJapaneseTokenizer
    BertTokenizerLegacy BertweetTokenizer BigBirdTokenizer BioGptTokenizer BlenderbotSmallTokenizer
    BlenderbotTokenizer ByT5Tokenizer CLIPTokenizer CTRLTokenizer CanineTokenizer ClvpTokenizer
    CodeGenTokenizer CohereTokenizer CpmAntTokenizer CpmTokenizer DPRContextEncoderTokenizer DPRQuestionEncoderTokenizer
    DPRReaderTokenizer DebertaTokenizer DebertaV2Tokenizer DiaTokenizer DistilBertTokenizer EsmTokenizer EsmcTokenizer
    FSMTTokenizer FastSpeech2ConformerTokenizer FlaubertTokenizer FunnelTokenizer GPTNeoXJapaneseTokenizer
    GPTSw3Tokenizer HerbertTokenizer LEDTokenizer LasrTokenizer LayoutLMv2Tokenizer LayoutLMv3Tokenizer
    LayoutXLMTokenizer LukeTokenizer LxmertTokenizer M2M100Tokenizer MBart50Tokenizer MBartTokenizer MLukeTokenizer
    MPNetTokenizer MarianTokenizer MarkupLMTokenizer MgpstrTokenizer MobileBertTokenizer MvpTokenizer MyT5Tokenizer
    NllbTokenizer NougatTokenizer OpenAIGPTTokenizer PLBartTokenizer PegasusTokenizer PerceiverTokenizer
    PhobertTokenizer Pop2PianoTokenizer ProphetNetTokenizer Qwen3_5Tokenizer RagTokenizer ReformerTokenizer
    RemBertTokenizer RoCBertTokenizer RoFormerTokenizer SeamlessM4TTokenizer Siglip2Tokenizer
    SiglipTokenizer Speech2TextTokenizer SpeechT5Tokenizer SplinterTokenizer SqueezeBertTokenizer T5Tokenizer
    TapasTokenizer Tipsv2Tokenizer UdopTokenizer VideoPrismTokenizer VitsTokenizer Wav2Vec2CTCTokenizer
    Wav2Vec2PhonemeCTCTokenizer WhisperTokenizer XGLMTokenizer XLMTokenizer XLNetTokenizer
"""
UNSUPPORTED_CLASSES = frozenset(_OTHERS.split())


#: (BPE's vocabulary, its merges, tokenizer_config.json with the special tokens) → tokenizer without added ones.
BuildMerges = Callable[[dict[str, int], list[tuple[str, str]], Mapping[str, Any]], tokenizers.Tokenizer]
#: (Unigram's tokens with their scores, what its characters become, as above) → the same.
BuildUnigram = Callable[[list[tuple[str, float]], bytes | None, Mapping[str, Any]], tokenizers.Tokenizer]


class TokenizerClass(NamedTuple):
    """How to build a class's tokenizer, and its default special tokens.

    build: from BPE merges; unigram: from scores; one of the two. extra: further special tokens. flags_all: whether
    every special token is added once more, without its flags. before, behind: names of the tokens around a text,
    whatever tokenizer.json says; "" is none, None leaves it to tokenizer.json.
    """

    named: Mapping[str, str]
    build: BuildMerges | None = None
    unigram: BuildUnigram | None = None
    extra: tuple[str, ...] = ()
    flags_all: bool = False
    before: str | None = None
    behind: str | None = None


def tokenizer_class(config: Mapping[str, Any], model_config: Mapping[str, Any], is_byte_level: bool) -> str:
    """The class that `AutoTokenizer` would use: a key of `CLASSES` or `PLAIN`; CheckpointError for unsupported ones.

    is_byte_level: whether tokenizer.json has a ByteLevel part.
    """
    model_type = model_config.get("model_type")
    registered = _OF_MODEL_TYPE.get(str(model_type))
    named = config.get("tokenizer_class") or model_config.get("tokenizer_class")
    name = named.removesuffix("Fast") if isinstance(named, str) else None
    if name is None:
        chosen = registered or PLAIN
    elif registered == PLAIN:
        chosen = PLAIN
    elif model_type in _ALWAYS and registered is not None:
        chosen = registered
    elif name == "LlamaTokenizer" and is_byte_level:
        chosen = PLAIN
    else:
        chosen = name
    if chosen in UNSUPPORTED_CLASSES:
        raise CheckpointError(
            f"tokenizer_class {chosen!r} is rebuilt by transformers in a way that is not supported; supported are "
            f"{', '.join(CLASSES)}. If tokenizer.json is right, save it with tokenizer_class PreTrainedTokenizerFast"
        )
    return chosen if chosen in CLASSES else PLAIN


def rebuild_tokenizer(
    name: str, content: Mapping[str, Any], backend: tokenizers.Tokenizer, config: Mapping[str, Any]
) -> tokenizers.Tokenizer:
    """The tokenizer of class `name` over the vocabulary and the merges or scores of tokenizer.json's `content`.

    backend: tokenizer.json as it is; its post-processor is reused. CheckpointError if its model is of another kind than
    the class needs.
    """
    model = content.get("model")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    build, unigram = CLASSES[name].build, CLASSES[name].unigram
    if isinstance(model, dict) and isinstance(vocab, dict) and build is not None:
        merges = (merge.split(" ", 1) if isinstance(merge, str) else merge for merge in model.get("merges", []))
        built = build(vocab, [(str(left), str(right)) for left, right in merges], config)
    elif isinstance(vocab, list) and unigram is not None:
        try:
            built = unigram([(str(token), float(score)) for token, score in vocab], _charsmap(content), config)
        except Exception as error:  # the binding raises bare Exception
            raise CheckpointError(
                f"tokenizer.json has no Unigram model that {name} can be built from: {error}"
            ) from error
    else:
        kind = model.get("type") if isinstance(model, dict) else None
        needed = "byte-pair encoding" if build is not None else "a Unigram model"
        raise CheckpointError(
            f"tokenizer_class {name!r} is {needed} but tokenizer.json has a model of type {kind!r}; "
            "save the tokenizer with tokenizer_class PreTrainedTokenizerFast if tokenizer.json is right"
        )
    if backend.post_processor is not None:
        built.post_processor = backend.post_processor
    return built


def _charsmap(content: Mapping[str, Any]) -> bytes | None:
    """SentencePiece's character map, from the first normaliser that has one."""
    normalizer = content.get("normalizer") or {}
    parts = normalizer.get("normalizers", []) if normalizer.get("type") == "Sequence" else [normalizer]
    tables = [part["precompiled_charsmap"] for part in parts if part.get("type") == "Precompiled"]
    return base64.b64decode(tables[0]) if tables else None


def _llama(vocab: dict[str, int], merges: list[tuple[str, str]], config: Mapping[str, Any]) -> tokenizers.Tokenizer:
    built = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges, fuse_unk=True, byte_fallback=True))
    has_prefix = config.get("add_prefix_space") is not False
    scheme = "never" if not has_prefix else "always" if config.get("legacy", False) else "first"
    built.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=scheme, split=False)
    built.decoder = decoders.Sequence([*_spaces_and_bytes(), *([decoders.Strip(" ", 1, 0)] if has_prefix else [])])
    return built


def _code_llama(
    vocab: dict[str, int], merges: list[tuple[str, str]], config: Mapping[str, Any]
) -> tokenizers.Tokenizer:
    unknown = str(config["unk_token"])
    model = models.BPE(vocab=vocab, merges=merges, fuse_unk=True, byte_fallback=True, unk_token=unknown)
    built = tokenizers.Tokenizer(model)
    scheme = "never" if config.get("add_prefix_space") is False else "first"
    built.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=scheme, split=False)
    built.decoder = decoders.Sequence([*_spaces_and_bytes(), decoders.Strip(" ", 1, 0)])
    return built


def _gemma(vocab: dict[str, int], merges: list[tuple[str, str]], config: Mapping[str, Any]) -> tokenizers.Tokenizer:
    unknown = str(config["unk_token"])
    model = models.BPE(vocab=vocab, merges=merges, fuse_unk=True, byte_fallback=True, unk_token=unknown)
    built = tokenizers.Tokenizer(model)
    built.normalizer = normalizers.Replace(" ", "▁")
    built.pre_tokenizer = pre_tokenizers.Split(" ", behavior="merged_with_previous", invert=False)
    built.decoder = decoders.Sequence(_spaces_and_bytes())
    return built


def _bert(vocab: dict[str, int], _merges: list[tuple[str, str]], config: Mapping[str, Any]) -> tokenizers.Tokenizer:
    built = tokenizers.Tokenizer(models.WordPiece(vocab, unk_token=str(config["unk_token"])))
    built.normalizer = normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=config.get("tokenize_chinese_chars", True),
        strip_accents=config.get("strip_accents"),
        lowercase=config.get("do_lower_case", True),
    )
    built.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    built.decoder = decoders.WordPiece(prefix="##")
    return built


def _gpt2(vocab: dict[str, int], merges: list[tuple[str, str]], config: Mapping[str, Any]) -> tokenizers.Tokenizer:
    built = tokenizers.Tokenizer(_byte_level_model(vocab, merges))
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=bool(config.get("add_prefix_space")))
    built.decoder = decoders.ByteLevel()
    return built


def _gpt_neox(vocab: dict[str, int], merges: list[tuple[str, str]], config: Mapping[str, Any]) -> tokenizers.Tokenizer:
    built = _gpt2(vocab, merges, config)
    built.normalizer = normalizers.NFC()
    return built


def _qwen2(vocab: dict[str, int], merges: list[tuple[str, str]], config: Mapping[str, Any]) -> tokenizers.Tokenizer:
    built = tokenizers.Tokenizer(_byte_level_model(vocab, merges))
    built.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(_QWEN2_SPLIT), behavior="isolated", invert=False)
    has_prefix = bool(config.get("add_prefix_space"))
    built.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=has_prefix, use_regex=False)]
    )
    built.decoder = decoders.ByteLevel()
    return built


def _camembert(
    scores: list[tuple[str, float]], charsmap: bytes | None, config: Mapping[str, Any]
) -> tokenizers.Tokenizer:
    unknown = str(config["unk_token"])
    unk_id = next((index for index, (token, _) in enumerate(scores) if token == unknown), 0)
    return _unigram(unk_id, scores, charsmap, config)


def _unigram(
    unk_id: int, scores: list[tuple[str, float]], charsmap: bytes | None, config: Mapping[str, Any]
) -> tokenizers.Tokenizer:
    built = tokenizers.Tokenizer(models.Unigram(scores, unk_id=unk_id, byte_fallback=False))
    if charsmap is not None:
        built.normalizer = normalizers.Precompiled(charsmap)
    scheme = "always" if config.get("add_prefix_space", True) else "never"
    spaces = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=scheme)
    built.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), spaces])
    built.decoder = decoders.Metaspace(replacement="▁", prepend_scheme=scheme)
    return built


def _byte_level_model(vocab: dict[str, int], merges: list[tuple[str, str]]) -> models.BPE:
    return models.BPE(vocab=vocab, merges=merges, continuing_subword_prefix="", end_of_word_suffix="", fuse_unk=False)


def _spaces_and_bytes() -> list[decoders.Decoder]:
    return [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]


_SENTENCE = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
_INFILLING = {
    "prefix_token": "▁<PRE>",
    "middle_token": "▁<MID>",
    "suffix_token": "▁<SUF>",
    "eot_token": "▁<EOT>",
    "fill_token": "<FILL_ME>",
}
_END = "<|endoftext|>"
_ROBERTA = _SENTENCE | {"sep_token": "</s>", "pad_token": "<pad>", "cls_token": "<s>", "mask_token": "<mask>"}
CLASSES: Mapping[str, TokenizerClass] = {
    "LlamaTokenizer": TokenizerClass(_SENTENCE, _llama),
    "CodeLlamaTokenizer": TokenizerClass(
        _SENTENCE | _INFILLING, _code_llama, extra=tuple(_INFILLING.values()), before="bos_token"
    ),
    "BertTokenizer": TokenizerClass(
        {
            "unk_token": "[UNK]",
            "sep_token": "[SEP]",
            "pad_token": "[PAD]",
            "cls_token": "[CLS]",
            "mask_token": "[MASK]",
        },
        _bert,
    ),
    "GPT2Tokenizer": TokenizerClass({"unk_token": _END, "bos_token": _END, "eos_token": _END}, _gpt2),
    "GPTNeoXTokenizer": TokenizerClass(
        {"unk_token": _END, "bos_token": _END, "eos_token": _END, "pad_token": "<|padding|>"}, _gpt_neox, before=""
    ),
    "RobertaTokenizer": TokenizerClass(_ROBERTA, _gpt2, before="cls_token", behind="sep_token"),
    "XLMRobertaTokenizer": TokenizerClass(
        _ROBERTA, unigram=partial(_unigram, 3), before="bos_token", behind="eos_token"
    ),
    "CamembertTokenizer": TokenizerClass(
        _ROBERTA,
        unigram=_camembert,
        extra=("<s>NOTUSED", "</s>NOTUSED", "<unk>NOTUSED"),
        before="bos_token",
        behind="eos_token",
    ),
    "Qwen2Tokenizer": TokenizerClass({"unk_token": _END, "eos_token": _END, "pad_token": _END}, _qwen2, flags_all=True),
    "GemmaTokenizer": TokenizerClass(
        {
            "unk_token": "<unk>",
            "bos_token": "<bos>",
            "eos_token": "<eos>",
            "pad_token": "<pad>",
            "mask_token": "<mask>",
        },
        _gemma,
    ),
}
