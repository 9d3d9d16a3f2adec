"""Pass rates of the demo adapters with structured outputs, and without.

Prints one Markdown table row per adapter, and for `tools` one of the base. Each answers the same held-out prompts
twice, greedily: freely, and by a grammar as the service makes it from a JSON schema (`extract`), strict tools (`tools`,
with `tool_choice: auto`) or a regular expression (`sql`, `support`). An answer that no program can parse is malformed.
The engine is this project's own, without a server.

    python -m examples.training.structured_outputs
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from app.deployments.ingress.preprocess.tools import Tool, tool_grammar
from app.engine.api import LLM
from app.engine.models.chat.tool_call_formats import HERMES
from app.engine.models.download.model_download import DEFAULT_MODEL_URI
from app.engine.request import SamplingParams
from app.engine.structured_output.grammar_builder import json_grammar, regex_grammar
from examples.training import extract, support, tools
from examples.training.recipes import RECIPES
from examples.training.task import Example, examples

HEADER = (
    "| adapter | prompts | right, freely | right, enforced | malformed, freely | malformed, enforced |\n"
    "|---|---|---|---|---|---|"
)
ORDER = {
    "type": "object",
    "properties": {
        field: {"type": ["integer" if field == "quantity" else "string", "null"]} for field in extract.FIELDS
    },
    "required": list(extract.FIELDS),
    "additionalProperties": False,
}
QUERY = r"SELECT [^\n;]+;"
REPLY = (
    r"Hello [A-Z][a-z]+!\nThank you for telling us about [A-Z]{2}-[0-9]+\. I am sorry that [a-zA-Z ]+\.\nWe will ("
    + "|".join(problem.step for problem in support.PROBLEMS)
    + rf")\.\n{support.SIGN_OFF}"
)


class Form(NamedTuple):
    """An answer's required form: as a grammar, and as a check of an answer."""

    grammar: str
    is_well_formed: Callable[[str], bool]


def has_form(text: str, schema: Mapping[str, Any]) -> bool:
    """Whether a text is an object by one of the flat schemas here: its keys, their types and enumerations."""
    try:
        found = json.loads(text)
    except json.JSONDecodeError:
        return False
    types = {"string": str, "integer": int, "null": type(None)}
    if not isinstance(found, dict) or set(found) != set(schema["required"]):
        return False
    for field, wanted in schema["properties"].items():
        names = wanted.get("type", "string")
        if type(found[field]) not in [types[name] for name in ([names] if isinstance(names, str) else names)]:
            return False
        if "enum" in wanted and found[field] not in wanted["enum"]:
            return False
    return True


def calls_well(text: str) -> bool:
    """Whether an answer is words, or a call of a tool with arguments by its schema."""
    if HERMES.marker not in text:
        return True
    call = tools.read_call(text)
    if call is None:
        return False
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools.TOOLS}
    return has_form(json.dumps({field: call[field] for field in call if field != "tool"}), schemas[call["tool"]])


def forms() -> dict[str, Form]:
    """Forms by adapter."""
    functions = [tool["function"] for tool in tools.TOOLS]
    known = [Tool(function["name"], function["parameters"], True, "tools") for function in functions]
    calling = tool_grammar(known, HERMES, {}, is_forced=False, is_parallel=False)
    return {
        "extract": Form(json_grammar(ORDER, "schema"), lambda text: has_form(text, ORDER)),
        "sql": Form(regex_grammar(QUERY, "regex"), lambda text: re.fullmatch(QUERY, text) is not None),
        "support": Form(regex_grammar(REPLY, "regex"), lambda text: re.fullmatch(REPLY, text) is not None),
        "tools": Form(calling, calls_well),
    }


def rates(llm: LLM, name: str, folder: Path | None, held_out: list[Example]) -> str:
    """A table row. `folder`: the adapter's, None for the base."""
    task, form = RECIPES[name].task, forms()[name]
    prompts = []
    for example in held_out:
        system = [] if task.system is None else [{"role": "system", "content": task.system}]
        said = [{"role": role, "content": text} for role, text in (*example.before, ("user", example.prompt))]
        prompts.append(llm.tokenizer.encode(llm.tokenizer.render_chat([*system, *said]), add_special_tokens=False))
    right, malformed = [], []
    for grammar in ("", form.grammar):
        sampling = SamplingParams(max_tokens=task.max_new_tokens, temperature=0.0, grammar=grammar)
        texts = [answer.text for answer in llm.generate(prompts, folder, sampling)]
        right.append(sum(task.check(example, text) is None for example, text in zip(held_out, texts, strict=True)))
        bad = [text for text in texts if not form.is_well_formed(text)]
        malformed.append(len(bad))
        for text in bad[:3]:
            print(f"  malformed: {text!r}")
    shares = [f"{count}/{len(held_out)} ({100 * count / len(held_out):.0f} %)" for count in right]
    shown = f"`{name}`" if folder is not None else f"base, asked as `{name}`"
    row = f"| {shown} | {len(held_out)} | {shares[0]} | {shares[1]} | {malformed[0]} | {malformed[1]} |"
    print(row, flush=True)
    return row


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Pass rates with enforced forms and without.")
    parser.add_argument("adapters", nargs="*", default=sorted(RECIPES), help="recipe names, all by default")
    parser.add_argument("--model", default=DEFAULT_MODEL_URI, help="path or source URI of the demo base")
    parser.add_argument("--folder", type=Path, default=Path("examples/adapters"), help="folder of the adapter folders")
    parser.add_argument("--num-prompts", type=int, default=80)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    rows = []
    with LLM(arguments.model) as llm:
        for name in arguments.adapters:
            held_out = examples(RECIPES[name].task, "heldout", arguments.num_prompts, arguments.seed)
            rows.append(rates(llm, name, arguments.folder / name, held_out))
            if name == "tools":
                rows.append(rates(llm, name, None, held_out))
    print("\n".join([HEADER, *rows]))


if __name__ == "__main__":
    main()
