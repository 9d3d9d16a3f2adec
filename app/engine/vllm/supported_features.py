"""Features of adapters beyond plain LoRA that vLLM serves; others are refused at registration.

There are none: its LoRA layers add B A x to a linear module and nothing else. rsLoRA, patterns of ranks and alphas,
fused and expert layouts and converted initialisations are plain LoRA once the adapter is read. The module imports
nothing of vLLM, so that the reader process can use it.
"""

from __future__ import annotations

#: Members of `app.engine.adapters.adapter.FEATURES`.
SERVED: frozenset[str] = frozenset()
