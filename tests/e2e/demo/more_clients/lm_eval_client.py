"""lm-eval, as its users run it: `lm_eval_client.py URL MODEL GGUF [ADAPTER]`.

A status of 0 says that it measures the same through the service as with its Hugging Face backend, which loads the base
model's file and the adapter's folder itself: log-likelihoods of choices and of whole texts, and greedy answers.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import lm_eval
import transformers
import yaml
from lm_eval.tasks import TaskManager

#: Largest difference of two log-likelihoods.
TOLERANCE = 1e-3
CAPITALS = {
    "France": "Paris", "Italy": "Rome", "Spain": "Madrid", "Japan": "Tokyo", "Egypt": "Cairo", "Peru": "Lima",
    "Greece": "Athens", "Norway": "Oslo", "Cuba": "Havana", "Kenya": "Nairobi", "Chile": "Santiago", "Iran": "Tehran",
    "Iraq": "Baghdad", "Russia": "Moscow", "China": "Beijing", "India": "New Delhi", "Austria": "Vienna",
    "Ireland": "Dublin", "Portugal": "Lisbon", "Sweden": "Stockholm",
}  # fmt: skip
#: What the two backends are given beside the model: single requests of token ids, batches, and batches of texts.
MODES: tuple[dict[str, Any], ...] = (
    {},
    {"batch_size": 8},
    {"num_concurrent": 4, "tokenized_requests": False},
)


def write_tasks(folder: Path) -> list[str]:
    """Three tasks in lm-eval's format with local data; returns their names."""
    cities, questions = list(CAPITALS.values()), []
    for number, (country, city) in enumerate(CAPITALS.items()):
        others = [cities[(number + step) % len(cities)] for step in (1, 2, 3)]
        choices, answer = [*others[: number % 4], city, *others[number % 4 :]], number % 4
        questions.append({"question": f"What is the capital of {country}?", "choices": choices, "answer": answer})
        sums = [str(3 * number + 5 + step) for step in (-1, 0, 1, 10)]
        questions.append({"question": f"What is {number + 5} + {2 * number}?", "choices": sums, "answer": 1})
    texts = [{"text": f"The capital of {country} is {city}. It is a large city."} for country, city in CAPITALS.items()]
    shared = {"dataset_path": "json", "test_split": "test", "fewshot_split": "test"}
    asked = shared | {"doc_to_text": "Question: {{question}}\nAnswer:", "num_fewshot": 3}
    tasks: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
        "choices": (questions, asked | {
            "output_type": "multiple_choice", "doc_to_choice": "choices", "doc_to_target": "answer",
            "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
        }),
        "texts": (texts[:4], shared | {
            "output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}",
            "metric_list": [{"metric": "word_perplexity"}],
        }),
        "answers": (questions, asked | {
            "output_type": "generate_until", "doc_to_target": "{{choices[answer]}}",
            "generation_kwargs": {"until": ["\n"], "max_gen_toks": 8, "do_sample": False},
            "metric_list": [{"metric": "exact_match"}],
        }),
    }  # fmt: skip
    for name, (rows, task) in tasks.items():
        data = folder / f"{name}.jsonl"
        data.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        files = {"dataset_kwargs": {"data_files": {"test": str(data)}}}
        (folder / f"{name}.yaml").write_text(yaml.safe_dump({"task": name} | files | task))
    return list(tasks)


def measured(model: str, arguments: dict[str, Any], tasks: list[str], folder: Path) -> dict[str, Any]:
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    found = lm_eval.simple_evaluate(model, arguments, tasks=tasks, task_manager=manager, bootstrap_iters=0)
    assert found is not None
    return found


def answers_of(results: dict[str, Any], task: str) -> list[Any]:
    """What the model answered to each document: pairs of log-likelihood and whether it is greedy, numbers, or texts."""
    samples = sorted(results["samples"][task], key=lambda sample: sample["doc_id"])
    return [answer for sample in samples for answer in sample["filtered_resps"]]


def compare(wanted: dict[str, Any], found: dict[str, Any], task: str) -> float:
    """The largest difference of log-likelihoods; AssertionError for a larger one than `TOLERANCE`, or another text."""
    largest = 0.0
    for ours, theirs in zip(answers_of(found, task), answers_of(wanted, task), strict=True):
        if task == "answers":
            assert ours == theirs, (task, ours, theirs)
            continue
        (our_value, our_flag), (their_value, their_flag) = (
            each if isinstance(each, tuple | list) else (each, None) for each in (ours, theirs)
        )
        assert our_flag == their_flag, (task, ours, theirs)
        largest = max(largest, abs(our_value - their_value))
    assert largest <= TOLERANCE, (task, largest)
    return largest


def main(url: str, model: str, gguf: str, adapter: str | None = None) -> None:
    file = Path(gguf)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tasks = write_tasks(folder)
        tokenizer = folder / "tokenizer"
        transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(tokenizer)
        local = {"pretrained": str(file.parent), "gguf_file": file.name, "dtype": "float32", "device": "cpu"}
        local |= {"batch_size": 8} | ({} if adapter is None else {"peft": adapter})
        wanted = measured("hf", local, tasks, folder)
        for mode in MODES:
            remote = {"model": model, "base_url": f"{url}/v1/completions", "tokenizer": str(tokenizer)} | mode
            found = measured("local-completions", remote, tasks, folder)
            for task in tasks:
                print(mode, task, f"largest difference {compare(wanted, found, task):.2g}")
            for metric in ("acc,none", "acc_norm,none"):
                scores = [results["results"]["choices"][metric] for results in (found, wanted)]
                print(mode, metric, *scores)
                assert scores[0] == scores[1], (metric, scores)


if __name__ == "__main__":
    main(*sys.argv[1:])
