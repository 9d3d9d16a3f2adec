"""What adapters may do beyond plain LoRA on this engine: what a scale and a shift per column of a module can
express, and which tokens are whose.

In: nothing. Out: the features that are served; an adapter that needs another is refused by name when it is registered.
It imports nothing of JAX, so that the process that reads adapters can ask.
"""

from __future__ import annotations

from app.engine.adapters.adapter import ACTIVATED

#: Those of `app.engine.adapters.adapter.FEATURES`.
SERVED = frozenset({"DoRA", "lora_bias", "trained biases", ACTIVATED})
