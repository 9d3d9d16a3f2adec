"""`chat_template_kwargs`: variables a request passes to its chat template, as in vLLM and SGLang.

Variables that the template does not use have no effect. Reserved names are checked by
`app.engine.models.chat.chat_template`.
"""

from __future__ import annotations

import json
from typing import Annotated, Any

from pydantic import AfterValidator

#: Length of a name, and of all variables as JSON.
MAX_NAME_CHARS, MAX_CHARS = 64, 16_384


def _check_variables(variables: dict[str, Any]) -> dict[str, Any]:
    for name in variables:
        if not (name.isascii() and name.isidentifier() and len(name) <= MAX_NAME_CHARS):
            raise ValueError(f"{name[:40]!r} is not a valid variable name")
    try:
        num_chars = len(json.dumps(variables))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if num_chars > MAX_CHARS:
        raise ValueError(f"it has {num_chars} characters as JSON; the limit is {MAX_CHARS}")
    return variables


TemplateVariables = Annotated[dict[str, Any], AfterValidator(_check_variables)]
