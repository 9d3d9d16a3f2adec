"""Lines of text that tokenizers get wrong: mixed scripts, code, white space, emoji, special strings."""

from __future__ import annotations

import random

_WORDS = (
    "the", "a", "Hello", "world's", "don't", "I'LL", "we've", "SELECT", "WHERE", "naïve", "façade", "Straße",
    "İstanbul", "ǅ", "ﬁn", "co-operate", "e.g.", "https://example.org/a?b=c&d=%20", "user@example.com",
    "3.14159", "1,000,000", "0xFF", "1e-9", "½", "²", "Ⅷ", "١٢٣", "12345678901234567890",
)  # fmt: skip
_CODE = (
    "def f(x):", "    return x ** 2", "\tif (a && b) {", "}};", "for i in range(10):", "x += y[-1]", "// comment",
    "<div class=\"a\">", "</div>", "#include <stdio.h>", "lambda *a, **k: None",
    "print(f'{x!r:>10}')", "\\n\\t\\\\", "$$\\alpha$$",
)  # fmt: skip
_SCRIPTS = (
    "你好，世界", "吾輩は猫である。", "안녕하세요", "Привет, мир!", "مرحبا بالعالم", "שלום", "नमस्ते", "สวัสดี", "Γειά σου",
    "ｆｕｌｌｗｉｄｔｈ", "e\u0301\u0323", "ﷺ", "𝔘𝔫𝔦𝔠𝔬𝔡𝔢", "𠮷野家",
)  # fmt: skip
_EMOJI = ("🎉", "👩‍👩‍👧‍👦", "🇩🇪", "👍🏽", "☃️", "🏳️‍🌈", "😀😀😀", "1️⃣")
_SPACE = (
    " ",
    "  ",
    "   ",
    "\t",
    "\n",
    "\n\n",
    "\r\n",
    " \n ",
    "\u00a0",
    "\u3000",
    "\u200b",
    "\u2028",
    "\x0b",
    "\x85",
    "\ufeff",
)
_SPECIAL = (
    "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<repo_name>", "<|im_end", "im_end|>",
    "<empty_output>", "<<|im_start|>>",
    "<s>", "</s>",
)  # fmt: skip


def random_line(random_state: random.Random) -> str:
    """One line of one to a few dozen pieces."""
    parts: list[str] = []
    for _ in range(random_state.choice((1, 2, 5, 12, 30))):
        kind = random_state.random()
        if kind < 0.30:
            parts.append(random_state.choice(_WORDS))
        elif kind < 0.42:
            parts.append(random_state.choice(_CODE))
        elif kind < 0.54:
            parts.append(random_state.choice(_SCRIPTS))
        elif kind < 0.62:
            parts.append(random_state.choice(_EMOJI))
        elif kind < 0.68:
            parts.append(random_state.choice(_SPECIAL))
        elif kind < 0.74:
            parts.append(str(random_state.randrange(10**6)))
        elif kind < 0.80:
            parts.append("".join(chr(_code_point(random_state)) for _ in range(random_state.randint(1, 6))))
        parts.append(random_state.choice(_SPACE) * random_state.choice((0, 1, 1, 1, 2, 5)))
    return "".join(parts)


def random_lines(count: int, seed: int) -> list[str]:
    """`count` lines; equal seeds give equal lines."""
    random_state = random.Random(seed)
    return [random_line(random_state) for _ in range(count)]


def _code_point(random_state: random.Random) -> int:
    """Any code point but a surrogate."""
    top = random_state.choice((0x80, 0x800, 0xD800, 0x110000))
    point = random_state.randrange(1, top)
    return point if not 0xD800 <= point < 0xE000 else 0x41
