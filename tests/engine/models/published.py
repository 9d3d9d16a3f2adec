"""The `config.json` of much used checkpoints, and what must become of each.

The files themselves are gated or far away; the values are those that their authors published.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Published(NamedTuple):
    """refused: what the error must name; "" where the model is read."""

    config: dict[str, Any]
    refused: str = ""


def _common(model_type: str, architecture: str, **values: Any) -> dict[str, Any]:
    return {
        "architectures": [architecture],
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "model_type": model_type,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        **values,
    }


def _llama(
    hidden: int, wide: int, layers: int, heads: int, kv_heads: int, positions: int, **values: Any
) -> dict[str, Any]:
    return _common(
        "llama",
        "LlamaForCausalLM",
        **{
            "bos_token_id": 1,
            "eos_token_id": 2,
            "hidden_size": hidden,
            "intermediate_size": wide,
            "max_position_embeddings": positions,
            "num_attention_heads": heads,
            "num_hidden_layers": layers,
            "num_key_value_heads": kv_heads,
            "pretraining_tp": 1,
            "rms_norm_eps": 1e-5,
            "rope_scaling": None,
            "tie_word_embeddings": False,
            "vocab_size": 32000,
            **values,
        },
    )


def _llama3(hidden: int, wide: int, layers: int, heads: int, **values: Any) -> dict[str, Any]:
    return _llama(
        hidden,
        wide,
        layers,
        heads,
        8,
        131072,
        **{
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": 128000,
            "eos_token_id": [128001, 128008, 128009],
            "mlp_bias": False,
            "rope_scaling": {
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
                "rope_type": "llama3",
            },
            "rope_theta": 500000.0,
            "transformers_version": "4.42.3",
            "vocab_size": 128256,
            **values,
        },
    )


def _mistral(**values: Any) -> dict[str, Any]:
    return _common(
        "mistral",
        "MistralForCausalLM",
        **{
            "bos_token_id": 1,
            "eos_token_id": 2,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "max_position_embeddings": 32768,
            "num_attention_heads": 32,
            "num_hidden_layers": 32,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "sliding_window": None,
            "tie_word_embeddings": False,
            "vocab_size": 32000,
            **values,
        },
    )


def _qwen2(hidden: int, wide: int, layers: int, heads: int, kv_heads: int, **values: Any) -> dict[str, Any]:
    return _common(
        "qwen2",
        "Qwen2ForCausalLM",
        **{
            "attention_dropout": 0.0,
            "bos_token_id": 151643,
            "eos_token_id": 151645,
            "hidden_size": hidden,
            "intermediate_size": wide,
            "max_position_embeddings": 32768,
            "max_window_layers": layers,
            "num_attention_heads": heads,
            "num_hidden_layers": layers,
            "num_key_value_heads": kv_heads,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1000000.0,
            "sliding_window": 32768,
            "tie_word_embeddings": False,
            "transformers_version": "4.40.1",
            "use_sliding_window": False,
            "vocab_size": 152064,
            **values,
        },
    )


def _qwen3(hidden: int, wide: int, layers: int, heads: int, **values: Any) -> dict[str, Any]:
    return _common(
        "qwen3",
        "Qwen3ForCausalLM",
        **{
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": 151643,
            "eos_token_id": 151645,
            "head_dim": 128,
            "hidden_size": hidden,
            "intermediate_size": wide,
            "max_position_embeddings": 40960,
            "max_window_layers": layers,
            "num_attention_heads": heads,
            "num_hidden_layers": layers,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-6,
            "rope_scaling": None,
            "rope_theta": 1000000,
            "sliding_window": None,
            "tie_word_embeddings": False,
            "transformers_version": "4.51.0",
            "use_sliding_window": False,
            "vocab_size": 151936,
            **values,
        },
    )


def _gemma(model_type: str, architecture: str, **values: Any) -> dict[str, Any]:
    config = _common(
        model_type,
        architecture,
        attention_bias=False,
        attention_dropout=0.0,
        bos_token_id=2,
        cache_implementation="hybrid",
        head_dim=256,
        hidden_activation="gelu_pytorch_tanh",
        pad_token_id=0,
        query_pre_attn_scalar=256,
        rms_norm_eps=1e-6,
    )
    del config["hidden_act"]
    return config | values


_GPTQ = {"bits": 4, "group_size": 128, "quant_method": "gptq", "desc_act": False, "sym": True}
_BNB = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "quant_method": "bitsandbytes"}

PUBLISHED: dict[str, Published] = {
    "huggyllama/llama-7b": Published(
        _llama(4096, 11008, 32, 32, 32, 2048, max_sequence_length=2048, pad_token_id=0, rms_norm_eps=1e-6)
    ),
    "meta-llama/Llama-2-7b-chat-hf": Published(
        _llama(4096, 11008, 32, 32, 32, 4096, _name_or_path="meta-llama/Llama-2-7b-chat-hf", torch_dtype="float16")
    ),
    "meta-llama/Llama-2-70b-hf": Published(_llama(8192, 28672, 80, 64, 8, 4096, torch_dtype="float16")),
    "lmsys/vicuna-7b-v1.5": Published(
        _llama(4096, 11008, 32, 32, 32, 4096, _name_or_path="vicuna-7b-v1.5", pad_token_id=0, torch_dtype="float16")
    ),
    "codellama/CodeLlama-7b-Instruct-hf": Published(
        _llama(4096, 11008, 32, 32, 32, 16384, rope_theta=1000000, vocab_size=32016)
    ),
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": Published(
        _llama(2048, 5632, 22, 32, 4, 2048, attention_bias=False, rope_theta=10000.0, transformers_version="4.35.0")
    ),
    "deepseek-ai/deepseek-coder-6.7b-instruct": Published(
        _llama(
            4096,
            11008,
            32,
            32,
            32,
            16384,
            bos_token_id=32013,
            eos_token_id=32021,
            rms_norm_eps=1e-6,
            rope_scaling={"factor": 4.0, "type": "linear"},
            rope_theta=100000,
            vocab_size=32256,
        )
    ),
    "01-ai/Yi-1.5-9B-Chat": Published(
        _llama(4096, 11008, 48, 32, 4, 4096, eos_token_id=7, rms_norm_eps=1e-6, rope_theta=5000000.0, vocab_size=64000)
    ),
    "NousResearch/Yarn-Llama-2-7b-128k": Published(
        _llama(
            4096,
            11008,
            32,
            32,
            32,
            131072,
            auto_map={"AutoConfig": "configuration_llama.LlamaConfig"},
            rope_scaling={
                "factor": 32.0,
                "original_max_position_embeddings": 4096,
                "type": "yarn",
                "finetuned": True,
            },
        ),
        refused="auto_map",
    ),
    "meta-llama/Meta-Llama-3-8B-Instruct": Published(
        _llama3(4096, 14336, 32, 32, max_position_embeddings=8192, rope_scaling=None, eos_token_id=128009)
    ),
    "meta-llama/Llama-3.1-8B-Instruct": Published(_llama3(4096, 14336, 32, 32)),
    "meta-llama/Llama-3.1-70B-Instruct": Published(_llama3(8192, 28672, 80, 64)),
    "meta-llama/Llama-3.2-1B-Instruct": Published(
        _llama3(
            2048,
            8192,
            16,
            32,
            head_dim=64,
            rope_scaling={
                "factor": 32.0,
                "high_freq_factor": 4.0,
                "low_freq_factor": 1.0,
                "original_max_position_embeddings": 8192,
                "rope_type": "llama3",
            },
            tie_word_embeddings=True,
        )
    ),
    "unsloth/Llama-3.2-3B-Instruct": Published(
        _llama3(3072, 8192, 28, 24, head_dim=128, pad_token_id=128004, tie_word_embeddings=True, unsloth_fixed=True)
    ),
    "unsloth/Meta-Llama-3.1-8B-Instruct-bnb-4bit": Published(
        _llama3(4096, 14336, 32, 32, quantization_config=_BNB), refused="quantization_config"
    ),
    "deepseek-ai/DeepSeek-R1-Distill-Llama-8B": Published(_llama3(4096, 14336, 32, 32, eos_token_id=128001)),
    "HuggingFaceTB/SmolLM2-135M-Instruct": Published(
        _llama(
            576,
            1536,
            30,
            9,
            3,
            8192,
            attention_bias=False,
            attention_dropout=0.0,
            is_llama_config=True,
            mlp_bias=False,
            pad_token_id=2,
            rope_interleaved=False,
            rope_theta=100000,
            tie_word_embeddings=True,
            vocab_size=49152,
            **{"transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16", "fp16": "float16"}}},
        )
    ),
    "HuggingFaceTB/SmolLM2-1.7B-Instruct": Published(
        _llama(
            2048, 8192, 24, 32, 32, 8192, pad_token_id=2, rope_theta=130000, tie_word_embeddings=True, vocab_size=49152
        )
    ),
    "mistralai/Mistral-7B-v0.1": Published(_mistral(sliding_window=4096, transformers_version="4.34.0.dev0")),
    "mistralai/Mistral-7B-Instruct-v0.2": Published(_mistral(attention_dropout=0.0, rope_theta=1000000.0)),
    "mistralai/Mistral-7B-Instruct-v0.3": Published(
        _mistral(attention_dropout=0.0, rope_theta=1000000.0, vocab_size=32768)
    ),
    "mistralai/Mistral-Nemo-Instruct-2407": Published(
        _mistral(
            head_dim=128,
            hidden_size=5120,
            max_position_embeddings=131072,
            num_hidden_layers=40,
            rope_theta=1000000.0,
            vocab_size=131072,
        )
    ),
    "mistralai/Ministral-8B-Instruct-2410": Published(
        _mistral(
            head_dim=128,
            intermediate_size=12288,
            num_hidden_layers=36,
            rope_theta=1e8,
            sliding_window=32768,
            vocab_size=131072,
        )
    ),
    "HuggingFaceH4/zephyr-7b-beta": Published(_mistral(pad_token_id=2, sliding_window=4096)),
    "Qwen/Qwen2-0.5B-Instruct": Published(_qwen2(896, 4864, 24, 14, 2, tie_word_embeddings=True, vocab_size=151936)),
    "Qwen/Qwen2.5-0.5B": Published(
        _qwen2(896, 4864, 24, 14, 2, eos_token_id=151643, tie_word_embeddings=True, use_mrope=False, vocab_size=151936)
    ),
    "Qwen/Qwen2.5-1.5B": Published(
        _qwen2(
            1536,
            8960,
            28,
            12,
            2,
            max_position_embeddings=131072,
            sliding_window=131072,
            tie_word_embeddings=True,
            use_mrope=False,
            vocab_size=151936,
        )
    ),
    "Qwen/Qwen2.5-7B-Instruct": Published(_qwen2(3584, 18944, 28, 28, 4, sliding_window=131072)),
    "Qwen/Qwen2.5-7B-Instruct-1M": Published(
        _qwen2(
            3584,
            18944,
            28,
            28,
            4,
            dual_chunk_attention_config={"chunk_size": 262144, "local_size": 8192},
            max_position_embeddings=1010000,
            rope_theta=10000000.0,
        ),
        refused="dual_chunk_attention_config",
    ),
    "Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4": Published(
        _qwen2(3584, 18944, 28, 28, 4, quantization_config=_GPTQ), refused="quantization_config"
    ),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B": Published(
        _qwen2(
            3584,
            18944,
            28,
            28,
            4,
            max_position_embeddings=131072,
            rope_theta=10000,
            sliding_window=4096,
            use_mrope=False,
        )
    ),
    "Qwen/QwQ-32B": Published(_qwen2(5120, 27648, 64, 40, 8, max_position_embeddings=40960, rms_norm_eps=1e-5)),
    "Qwen/Qwen3-0.6B": Published(_qwen3(1024, 3072, 28, 16, tie_word_embeddings=True)),
    "Qwen/Qwen3-8B": Published(_qwen3(4096, 12288, 36, 32)),
    "Qwen/Qwen3-4B-Instruct-2507": Published(
        _qwen3(2560, 9728, 36, 32, max_position_embeddings=262144, rope_theta=5000000, tie_word_embeddings=True)
    ),
    "google/gemma-2-2b-it": Published(
        _gemma(
            "gemma2",
            "Gemma2ForCausalLM",
            attn_logit_softcapping=50.0,
            eos_token_id=[1, 107],
            final_logit_softcapping=30.0,
            hidden_act="gelu_pytorch_tanh",
            hidden_size=2304,
            intermediate_size=9216,
            max_position_embeddings=8192,
            num_attention_heads=8,
            num_hidden_layers=26,
            num_key_value_heads=4,
            rope_theta=10000.0,
            sliding_window=4096,
            vocab_size=256000,
        )
    ),
    "google/gemma-3-1b-it": Published(
        _gemma(
            "gemma3_text",
            "Gemma3ForCausalLM",
            attn_logit_softcapping=None,
            eos_token_id=[1, 106],
            final_logit_softcapping=None,
            hidden_size=1152,
            intermediate_size=6912,
            max_position_embeddings=32768,
            num_attention_heads=4,
            num_hidden_layers=26,
            num_key_value_heads=1,
            rope_local_base_freq=10000,
            rope_scaling=None,
            rope_theta=1000000,
            sliding_window=512,
            sliding_window_pattern=6,
            vocab_size=262144,
        )
    ),
    "microsoft/Phi-3-mini-4k-instruct": Published(
        _llama(3072, 8192, 32, 32, 32, 4096) | {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3"},
        refused="phi3",
    ),
}
