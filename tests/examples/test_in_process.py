"""examples/in_process.py, which docs/reference/llm.md shows, on a tiny random model."""

from __future__ import annotations

from pathlib import Path

import pytest
import tokenizers
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from app.engine.models.checkpoint import load_checkpoint
from examples.in_process import main
from tests.engine.adapters.random_adapters import peft_config, peft_tensors, random_arrays, write_peft
from tests.engine.checkpoints import save, tiny_model, without_end


def test_the_example_generates_streams_embeds_and_frees(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = without_end(save(tiny_model("llama"), tmp_path / "model"))
    words = {f"w{index}": index for index in range(99)}
    backend = tokenizers.Tokenizer(WordLevel(words, unk_token="w0"))
    backend.pre_tokenizer = WhitespaceSplit()
    backend.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text("{% for message in messages %}{{ message['content'] }} w1{% endfor %}")
    spec = load_checkpoint(folder).spec
    adapter = write_peft(tmp_path / "adapter", peft_config(8), peft_tensors(random_arrays(spec, 8)))

    main(str(folder), str(adapter))

    lines = dict(line.split(": ", 1) for line in capsys.readouterr().out.splitlines())
    adapted, _, usage = lines["adapter"].partition(" (")
    assert usage == "16 tokens, length)"
    assert lines["stream"] == adapted
    assert lines["base"] != adapted
    assert lines["embedding"] == f"{spec.hidden_size} numbers"
    assert lines["freed rows"] == "8"
