"""The small mixture of experts: its words, its questions and its tokenizer."""

from __future__ import annotations

from random import Random

from examples.training.mixture import ADAPTERS, TASKS, VOCABULARY, ask_base, new_tokenizer, words


def test_no_held_out_word_is_trained_on() -> None:
    trained = set(words(Random(0), 3000, held_out=False))
    assert not trained.intersection(words(Random(0), 300, held_out=True))


def test_a_sign_says_what_becomes_of_a_word() -> None:
    assert {sign: transform("dbca") for sign, transform in TASKS.items()} == {"=": "dbca", "<": "acbd", ">": "abcd"}
    generator = Random(1)
    for prompt, answer in (ask_base(generator) for _ in range(50)):
        sign, word = (prompt[0], prompt[1:]) if prompt[0] in TASKS else ("=", prompt)
        assert answer == TASKS[sign](word)
    assert {name: transform("ba") for name, (transform, _) in ADAPTERS.items()} == {"reverse": "ab", "ascending": "ab"}


def test_every_character_is_a_token_and_a_chat_ends_in_the_sign_for_an_answer() -> None:
    tokenizer = new_tokenizer()
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "<dbca"}], tokenize=False, add_generation_prompt=True
    )
    assert text == "<dbca:"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert [VOCABULARY[index] for index in ids] == list(text)
    assert tokenizer.decode(ids) == text
