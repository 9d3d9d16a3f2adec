"""Chat templates: render messages to one prompt text, as transformers does.

The Jinja template comes from a model's files and is untrusted, so it runs sandboxed. A conversation that the template
refuses or cannot render is an `InvalidRequest`; a template that does not parse is a `CheckpointError`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.defaults
import jinja2.ext
import jinja2.filters
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from app.engine.errors import CheckpointError, InvalidRequest

#: Variables that a client may not set, besides the model's special tokens and the functions of templates: variables
#: that are set here, and parameters of transformers' own rendering function.
_OURS = frozenset({
    "messages", "conversation", "tools", "documents", "add_generation_prompt", "continue_final_message",
    "chat_template", "tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict",
    "return_assistant_tokens_mask", "tokenizer_kwargs",
    "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token",
})  # fmt: skip


def check_variables(variables: Collection[str], special_tokens: Collection[str]) -> None:
    """InvalidRequest for a variable that a client may not set; `special_tokens` are the names of the model's."""
    for name in variables:
        if name in _OURS or name in special_tokens or name in _FUNCTIONS or name in jinja2.defaults.DEFAULT_NAMESPACE:
            raise InvalidRequest(
                f"chat_template_kwargs has {name!r}, which is not a request's to set: chat templates find it set",
                param="chat_template_kwargs",
            )


class ChatTemplate:
    """One compiled template. `special_tokens`: name → text of the tokens it may use (bos_token, eos_token, …)."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self.source = source
        self._special_tokens = dict(special_tokens)
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise CheckpointError(f"the model's chat template does not parse: {error}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt. `extra`: further template variables (such as `enable_thinking`; `check_variables`)."""
        variables = {
            **self._special_tokens,
            **(extra or {}),
            # As in transformers, null keys are left out, so that no template writes "None".
            "messages": [{key: value for key, value in message.items() if value is not None} for message in messages],
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._template.render(variables)
        except (
            jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError,
        ) as error:  # fmt: skip
            raise InvalidRequest(
                f"the model's chat template refuses these messages: {error}", param="messages"
            ) from error


def load_lazy_modules() -> None:
    """Render what makes Python and Jinja import modules and read the time zone, before this process is confined."""
    filters = [f"{{{{ messages[0].role|{name} }}}}" for name in jinja2.filters.FILTERS]
    others = (
        "{{ strftime_now('%x') }}",
        "{{ lipsum(n=1) }}",
        "{% for a in",
        "{{ raise_exception('a') }}",
        r"{{ '\u1' }}",
    )
    for source in (*filters, *others):
        with suppress(InvalidRequest, CheckpointError):
            ChatTemplate(source, {}).render([{"role": "user", "content": "a"}])


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks assistant text for training; its body is rendered unchanged."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it so)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


class _Namespace(jinja2.utils.Namespace):
    """`namespace()` without underscore names, which could reach the interpreter's internals."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # noqa: N805, RUF100  ("self" may be a template's keyword)
        self, values = args[0], dict(*args[1:], **kwargs)
        for name in values:
            _refuse_underscore(name)
        jinja2.utils.Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: object) -> None:
        _refuse_underscore(name)
        super().__setitem__(name, value)


def _refuse_underscore(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace cannot hold the underscore name {name!r}")


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.globals.update(_FUNCTIONS)
    environment.filters["tojson"] = _to_json
    return environment


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    """`dict(...)` as a function: templates must not reach the attributes of the type itself."""
    return dict(*args, **kwargs)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """`tojson` without HTML escapes, unlike Jinja's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


#: Functions that templates can call besides Jinja's own.
_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "raise_exception": _raise_exception,
    "strftime_now": lambda pattern: datetime.now().strftime(pattern),
    "dict": _to_dict,
    "namespace": _Namespace,
}
