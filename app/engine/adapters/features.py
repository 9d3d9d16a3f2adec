"""What an adapter may have beyond plain LoRA on the layers, and the engines that apply it.

An adapter that needs a feature which its engine lacks is refused by name when it is read. rsLoRA, patterns of ranks and
alphas, fused and expert layouts and converted initialisations are plain LoRA once the adapter is read. The names are
worded as in error messages.
"""

from __future__ import annotations

DORA = "DoRA"
LORA_BIAS = "lora_bias"
EMBEDDING_LORA = "embedding LoRA"
LM_HEAD_LORA = "lm_head LoRA"
TRAINED_BIASES = "trained biases"
TRAINED_NORMS = "trained norms"
TRAINED_EMBEDDING = "trained embedding"
TRAINED_LM_HEAD = "trained lm_head"
TRAINED_LINEAR = "trained linear weights"
TRAINED_TOKEN_ROWS = "trained token rows"
#: Applies from its invocation tokens on (`app.engine.adapters.card`); needs no other arithmetic, only shorter runs.
ACTIVATED = "activated LoRA"
#: Has embedding and output matrices of another number of rows than the base's.
RESIZED = "a resized vocabulary"
#: Classifies or ranks texts instead of generating (`app.engine.adapters.score_head`).
SCORE_HEAD = "a score head"

#: All features, which the CPU engine applies.
FEATURES = frozenset(
    {
        DORA, LORA_BIAS, EMBEDDING_LORA, LM_HEAD_LORA, TRAINED_BIASES, TRAINED_NORMS, TRAINED_EMBEDDING,
        TRAINED_LM_HEAD, TRAINED_LINEAR, TRAINED_TOKEN_ROWS, ACTIVATED, RESIZED, SCORE_HEAD,
    }
)  # fmt: skip
CUDA_FEATURES = FEATURES - {RESIZED, SCORE_HEAD}
#: What a scale and a shift per column of a module can express, and activated LoRA.
XLA_FEATURES = frozenset({DORA, LORA_BIAS, TRAINED_BIASES, ACTIVATED})
#: None: vLLM's LoRA layers add B A x to a linear module and nothing else.
VLLM_FEATURES: frozenset[str] = frozenset()
#: What an encoder's adapters may have.
ENCODER_FEATURES = frozenset({DORA, LORA_BIAS, SCORE_HEAD})
#: What a base with an adapter merged into it can represent; the others need tensors that the base lacks.
MERGEABLE_FEATURES = frozenset({DORA, LORA_BIAS, TRAINED_NORMS, TRAINED_BIASES, TRAINED_LINEAR})
#: Features that may turn out to be unneeded: PEFT also saves unchanged embedding and output matrices.
MAY_BE_COPIES = frozenset({TRAINED_EMBEDDING, TRAINED_LM_HEAD})
