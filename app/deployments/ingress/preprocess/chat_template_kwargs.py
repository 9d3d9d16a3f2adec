"""What a request tells its chat template beside the conversation (`chat_template_kwargs`, as vLLM and SGLang take it).

In: names and JSON values. Out: the same, within bounds. Rule: a variable that the template does not ask for changes
nothing. Which names are not a client's to set is for whoever knows the template (`app.engine.models.chat.chat_template`).
"""

from __future__ import annotations

import json
from typing import Annotated, Any

from pydantic import AfterValidator

#: Of a name.
MAX_NAME_CHARS = 64
#: Of all variables, as JSON.
MAX_CHARS = 16_384


def _checked(variables: dict[str, Any]) -> dict[str, Any]:
    """Raises ValueError."""
    for name in variables:
        if not (name.isascii() and name.isidentifier() and len(name) <= MAX_NAME_CHARS):
            raise ValueError(f"{name[:40]!r} is no name of a template's variable")
    try:
        num_chars = len(json.dumps(variables))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if num_chars > MAX_CHARS:
        raise ValueError(f"it has {num_chars} characters as JSON; at most {MAX_CHARS} are taken")
    return variables


TemplateVariables = Annotated[dict[str, Any], AfterValidator(_checked)]
