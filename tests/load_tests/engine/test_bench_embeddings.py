"""The benchmark of embeddings on a tiny encoder: every line is measured, and the vectors are transformers'."""

from __future__ import annotations

import json
import re
from pathlib import Path

from load_tests.engine.bench_embeddings import Settings, run
from tests.engine.encoders import save_encoder, tiny_encoder


def test_every_line_is_measured(tmp_path: Path) -> None:
    folder = save_encoder(tiny_encoder("bert"), tmp_path)
    names = {"unk_token": "[UNK]", "pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names | {"tokenizer_class": "PreTrainedTokenizerFast"}))
    settings = Settings(folder, num_texts=20, num_adapters=2, ranks=(2, 3), max_words=4, num_rounds=2, num_threads=1)
    lines = [line for line in run(settings).splitlines() if line.startswith("|")][2:]
    assert [line.split(" | ")[0] for line in lines] == [
        "| transformers", "| this engine, base", "| this engine, 2 adapters",
    ]  # fmt: skip
    for line in lines:
        spreads = re.findall(r"([\d.]+) \(([\d.]+) to ([\d.]+)\)", line)
        assert len(spreads) == 3
        assert all(0 < float(low) <= float(middle) <= float(high) for middle, low, high in spreads)
