"""Features of adapters beyond plain LoRA that the JAX engine serves; others are refused at registration.

They are what a scale and a shift per column of a module can express, and activated LoRA. The module imports nothing of
JAX, so that the reader process can use it.
"""

from __future__ import annotations

from app.engine.adapters.adapter import ACTIVATED

#: Members of `app.engine.adapters.adapter.FEATURES`.
SERVED = frozenset({"DoRA", "lora_bias", "trained biases", ACTIVATED})
