"""Chat templates: render messages to one prompt text, as transformers does.

The Jinja template comes from a model's files and is untrusted, so it runs sandboxed. A conversation that the template
refuses or cannot render is an `InvalidRequest`; a template that does not parse is a `CheckpointError`. The prompt is a
`UserText`, which knows which characters the request has written and which the template.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping, Sequence
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
from app.engine.models.chat.tool_call_formats import supports_tools, with_tools
from app.engine.models.chat.user_text import (
    UserText,
    concat,
    mark_text,
    result_of,
    str_join,
    text_of,
    to_json,
    track_text,
)

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
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> UserText:
        """The prompt. `extra`: further template variables (such as `enable_thinking`; `check_variables`).

        continue_final_message: the prompt ends with the last message's content. tools: None for a conversation without
        tools, [] if only earlier turns called some; a template without tools gets them as text.
        """
        # As in transformers, null keys are left out, so that no template writes "None".
        conversation: list[dict[str, Any]] = [
            {key: value if key == "role" else mark_text(value) for key, value in message.items() if value is not None}
            for message in messages
        ]
        tools = None if tools is None else mark_text(tools)
        if tools is not None and not supports_tools(self.source):
            conversation, tools = with_tools(conversation, tools), None
        if continue_final_message:
            conversation[-1] = conversation[-1] | {"content": conversation[-1].get("content", "") + _TAG}
        variables = {
            **self._special_tokens,
            **{name: mark_text(value) for name, value in (extra or {}).items()},
            "messages": conversation,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            prompt = UserText(self._template.render(variables))
            return _until_tag(prompt, conversation[-1]["content"]) if continue_final_message else prompt
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


#: Ends the content of a message to be continued, as in transformers. Templates that trim it cut its last space.
_TAG = "CONTINUE_FINAL_MESSAGE_TAG "


def _until_tag(prompt: UserText, content: str) -> UserText:
    """The prompt up to the end of the last message's content, which ends with `_TAG`."""
    start = prompt.rfind(_TAG.strip())
    if start < 0 or content.removesuffix(_TAG).strip() not in prompt:
        raise ValueError("the last message cannot be continued, because the template changes or leaves out its content")
    return prompt[:start] if prompt[start:].startswith(_TAG) else prompt[:start].rstrip()


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


class _Template(jinja2.Template):
    """Joins text as `UserText`."""

    @classmethod
    def _from_namespace(
        cls, environment: jinja2.Environment, namespace: MutableMapping[str, Any], globals: MutableMapping[str, Any]
    ) -> jinja2.Template:
        namespace["str_join"] = str_join
        return super()._from_namespace(environment, namespace, globals)


class _Environment(ImmutableSandboxedEnvironment):
    """Keeps the origin of characters (`UserText`) through attributes, calls, operators and filters."""

    template_class = _Template
    concat = staticmethod(concat)
    intercepted_binops = frozenset({"%"})

    def getattr(self, obj: Any, attribute: str) -> Any:
        return super().getattr(UserText(obj, ()) if type(obj) is str else obj, attribute)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        owner = getattr(__obj, "__self__", None)
        result = super().call(__context, __obj, *args, **kwargs)
        values = (value for name, value in kwargs.items() if name not in ("_loop_vars", "_block_vars"))  # Jinja's own
        return result_of(result, owner if isinstance(owner, str) else None, *args, *values)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        return result_of(super().call_binop(context, operator, left, right), left, right)


#: Filters that return one of their arguments or a part of one, and filters that use only methods of `UserText`.
_CHOOSING = frozenset({"first", "last", "attr", "default", "d", "min", "max", "random"})
_EXACT = frozenset({"trim", "upper", "lower", "replace"})


def _environment() -> ImmutableSandboxedEnvironment:
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, finalize=text_of, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.globals.update(_FUNCTIONS)
    filters = environment.filters
    known = {name: each for name, each in filters.items() if name not in _CHOOSING}
    filters.update({name: track_text(each, is_exact=name in _EXACT) for name, each in known.items()})
    filters.update({"tojson": to_json, "join": _join, "safe": text_of, "string": text_of})
    return environment


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    """`dict(...)` as a function: templates must not reach the attributes of the type itself."""
    return dict(*args, **kwargs)


@jinja2.pass_environment
def _join(
    environment: jinja2.Environment, values: Iterable[Any], separator: str = "", attribute: str | int | None = None
) -> UserText:
    if attribute is not None:
        values = map(jinja2.filters.make_attrgetter(environment, attribute), values)
    return UserText(separator, ()).join(map(text_of, values))


#: Functions that templates can call besides Jinja's own.
_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "raise_exception": _raise_exception,
    "strftime_now": lambda pattern: datetime.now().strftime(pattern),
    "dict": _to_dict,
    "namespace": _Namespace,
}
