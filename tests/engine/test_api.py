"""The Python API and the command line over a tiny random model: text in, text out."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from app.engine.__main__ import main
from app.engine.adapters.card import AdapterRef
from app.engine.api import LLM, TENANT
from app.engine.config import CpuConfig, EngineConfig
from app.engine.errors import AdapterFormatError, ContextOverflow, InvalidRequest, NotFound, SourceError
from app.engine.models.checkpoint import load_checkpoint
from app.engine.request import GenerateRequest, SamplingParams
from tests.engine.adapters.random_adapters import peft_config, peft_tensors, random_arrays, write_peft
from tests.engine.checkpoints import save, tiny_model, without_end

CONFIG = EngineConfig(
    cpu=CpuConfig(num_threads=1), num_kv_blocks=64, lora_pool_rows=64, max_num_batched_tokens=32, max_queued_requests=3
)
ROOT = Path(__file__).parents[2]
TEMPLATE = "{% for message in messages %}{{ message['role'] }} {{ message['content'] }} {% endfor %}w9"
LONG = SamplingParams(max_tokens=20, temperature=0.9, seed=11, ignore_eos=True, num_logprobs=1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with weights, a tokenizer of words w0 to w98, and a chat template."""
    folder = save(tiny_model("llama"), tmp_path_factory.mktemp("model"))
    words = {f"w{index}": index for index in range(97)} | {"user": 97, "system": 98}
    backend = tokenizers.Tokenizer(WordLevel(words, unk_token="w0"))
    backend.pre_tokenizer = WhitespaceSplit()
    backend.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def adapter(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    arrays = random_arrays(load_checkpoint(model).spec, 8)
    return write_peft(tmp_path_factory.mktemp("adapter"), peft_config(8), peft_tensors(arrays))


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    with LLM(model, CONFIG) as llm:
        yield llm


def test_answers_come_in_order_and_are_those_of_being_alone(llm: LLM, adapter: Path) -> None:
    prompts = [f"w{index} w{index + 1} w{index * 3}" for index in range(3, 13)]  # more than may wait
    adapters = [adapter if index % 2 else None for index in range(10)]
    together = llm.generate(prompts, adapters, LONG)
    for prompt, path, answer in zip(prompts, adapters, together, strict=True):
        (alone,) = llm.generate(prompt, path, LONG)
        assert (alone.text, alone.token_ids, alone.logprobs) == (answer.text, answer.token_ids, answer.logprobs)
        assert answer.text == " ".join(f"{'' if t > 96 else 'w'}{NAMES.get(t, t)}" for t in answer.token_ids)
        assert len(answer.token_ids) == 20
        assert (answer.finish_reason, answer.usage.prompt_tokens) == ("length", 3)
    assert llm.generate("w5 w6", adapter, LONG) != llm.generate("w5 w6", None, LONG)


NAMES = {97: "user", 98: "system"}


def test_streams_read_in_turns_lose_nothing(llm: LLM, adapter: Path) -> None:
    one, two = llm.stream("w4 w5", adapter, LONG), llm.stream([4, 6], None, LONG)
    texts = ["", ""]
    for pieces in zip_longest(one, two, fillvalue=""):  # an accepted draft makes one piece of two tokens
        texts = [text + piece for text, piece in zip(texts, pieces, strict=True)]
    expected = llm.generate([[4, 5], [4, 6]], [adapter, None], LONG)
    assert texts == [answer.text for answer in expected]


def test_a_removed_adapter_leaves_nothing_and_nothing_else_goes(llm: LLM, adapter: Path, tmp_path: Path) -> None:
    other = write_peft(tmp_path / "other", peft_config(4), peft_tensors(random_arrays(llm.spec, 4, seed=5)))
    copy = shutil.copytree(adapter, tmp_path / "copy")
    prompts, paths = ["w5 w6"] * 3, [None, adapter, other]
    before = llm.generate(prompts, paths, LONG)
    vectors = llm.embed(prompts, paths)
    digest, kept = (llm.load_adapter(path).card.digest for path in (adapter, other))
    llm.load_adapter(copy)
    assert llm.remove_adapter(copy) == 0, "the same contents are loaded from elsewhere"
    assert digest in {resident.digest for resident in llm.stats().residents}
    pieces = llm.stream("w5 w6", adapter, LONG)
    text = next(pieces)
    assert llm.remove_adapter(adapter) == 8, "when the answer under way has ended"
    assert text + "".join(pieces) == before[1].text
    assert {resident.digest for resident in llm.stats().residents} == {kept}
    with pytest.raises(NotFound, match="is not loaded"):
        llm.remove_adapter(adapter)
    assert llm.generate(prompts[::2], paths[::2], LONG) == before[::2]
    assert llm.generate(prompts, paths, LONG) == before, "it is read again"
    np.testing.assert_array_equal(llm.embed(prompts, paths), vectors)


def test_leaving_a_stream_ends_its_request(llm: LLM) -> None:
    stream = llm.stream("w7", None, LONG)
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    llm.generate("w8", None, SamplingParams(max_tokens=1))
    stats = llm.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_blocks_free) == (0, 0, stats.num_blocks)


def test_a_stop_token_ends_the_answer_and_is_not_shown(llm: LLM) -> None:
    (free,) = llm.generate("w3 w1", None, LONG)
    stop = free.token_ids[6]
    (stopped,) = llm.generate("w3 w1", None, SamplingParams(20, 0.9, seed=11, ignore_eos=True, stop_token_ids=(stop,)))
    count = free.token_ids.index(stop) + 1
    assert stopped.token_ids == free.token_ids[:count]
    assert stopped.finish_reason == "stop"
    assert len(stopped.text.split()) == count - 1


def test_token_ids_may_be_numpys(llm: LLM) -> None:
    sampling = SamplingParams(max_tokens=4, temperature=0.0)
    wanted = llm.generate([5, 6, 7], None, sampling)
    for prompt in (np.array([5, 6, 7]), list(np.array([5, 6, 7])), [np.array([5, 6, 7])]):
        assert llm.generate(prompt, None, sampling) == wanted  # type: ignore[arg-type]


def test_the_chat_template_is_applied(llm: LLM) -> None:
    assert llm.chat_prompt("w5", system="w6") == [98, 6, 97, 5, 9]


def test_mistakes_are_raised_and_leave_the_engine_usable(llm: LLM, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="adapters has 1 entries for 2 prompts"):
        llm.generate(["w1", "w2"], [None])
    with pytest.raises(InvalidRequest, match="mixes token ids"):
        llm.generate([1, "w2"])  # type: ignore[list-item]
    with pytest.raises(AdapterFormatError):
        llm.generate("w1", tmp_path)
    with pytest.raises(ContextOverflow, match="256"):
        llm.generate(["w1", "w1 " * 300], None, LONG)
    with pytest.raises(SourceError, match="no base model"):
        LLM(tmp_path / "absent", CONFIG)
    assert llm.generate([]) == []
    assert len(llm.generate("w1", None, SamplingParams(max_tokens=2, ignore_eos=True))[0].token_ids) == 2
    assert llm.stats().num_running == 0


def test_command_line(model: Path, adapter: Path, llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    (base,) = llm.generate([llm.chat_prompt("w5")], None, SamplingParams(8, 0.0))
    (tuned,) = llm.generate([llm.chat_prompt("w5")], adapter, SamplingParams(8, 0.0))
    arguments = ["--model", str(model), "--max-tokens", "8", "--num-threads", "1", "--prompt", "w5"]
    assert main(arguments) == 0
    assert capsys.readouterr().out == base.text + "\n"
    assert main([*arguments, "--adapter", str(adapter), "--adapter", "base"]) == 0
    assert capsys.readouterr().out == f"--- {adapter}: w5\n{tuned.text}\n--- base: w5\n{base.text}\n"
    assert main([*arguments, "--adapter", str(model)]) == 1
    assert "AdapterFormatError" in capsys.readouterr().err


def test_references_carry_the_contents_digest(llm: LLM, adapter: Path) -> None:
    loaded = llm.load_adapter(adapter)
    assert llm.load_adapter(adapter) is loaded
    request, weights = llm._request("w1", adapter, None)
    assert isinstance(request, GenerateRequest)
    assert weights is loaded
    assert request.adapter == AdapterRef(str(adapter), loaded.card.digest, TENANT)


def test_the_default_engine_computes_where_only_its_own_dependencies_are(
    model: Path, adapter: Path, tmp_path: Path
) -> None:
    """torch, Triton, JAX and transformers are for other engines and for tests."""
    endless = without_end(shutil.copytree(model, tmp_path / "model"))
    code = (
        "import sys; sys.modules |= dict.fromkeys(('torch', 'triton', 'jax', 'transformers', 'peft'))\n"
        "from app.engine.__main__ import main\n"
        "sys.exit(main(sys.argv[1:]))"
    )
    arguments = ["--model", str(endless), "--adapter", str(adapter), "--raw", "--prompt", "w3 w4", "--max-tokens", "3"]
    command = [sys.executable, "-c", code, *arguments, "--num-threads", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "3 generated tokens" in done.stderr
