"""The benchmark programs on a tiny model: everybody is given the same work, and ratios are ratios."""

from __future__ import annotations

import json
import threading
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from app.engine.adapters.formats.reading import read_adapter
from app.kernels.machine.thread_team import ThreadTeam
from load_tests import random_adapters
from load_tests.engine import bench_engine
from load_tests.engine.bench_engine import Settings
from load_tests.kernels import bench_matmul
from load_tests.random_adapters import write_random_adapters
from load_tests.stats import ratios, rounds, spread
from tests.engine.adapters.random_adapters import tiny_spec
from tests.engine.checkpoints import save, tiny_model


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT's own use
def test_the_engine_and_the_references_are_given_the_same_work(tmp_path: Path) -> None:
    """The tokens are compared, so a wrong adapter, prompt or order would show. The seed rules out near-ties."""
    torch.manual_seed(0)
    settings = Settings(
        model=save(tiny_model("llama"), tmp_path / "model"),
        streams=(1, 5),
        adapters=(3,),
        ranks=(8, 3),
        num_prompt_tokens=7,
        num_tokens=12,
        num_reference_tokens=9,
        num_rounds=2,
        seed=1,
        num_threads=1,
        with_reference=True,
    )
    lines: list[dict[str, Any]] = []
    text = bench_engine.run(settings, lines.append)
    json.dumps(lines)
    # Both references, the base and three adapters: (1 + 5) streams each.
    assert "same greedy tokens as the reference: 12 of 12" in text
    assert [line["kind"] for line in lines] == ["config"] + ["run"] * 20 + ["ratio"] * 8 + ["end"]
    rates: dict[tuple[object, ...], list[float]] = {}
    for line in lines:
        if line["kind"] == "run":
            key = (line["system"], line["num_adapters"], line["num_streams"])
            rates.setdefault(key, []).append(line["tokens_per_s"])
    assert len(rates) == 10
    assert all(len(values) == 2 and min(values) > 0 for values in rates.values())
    titled = next(line for line in lines if line.get("title") == "3 adapters / PEFT mixed batch, 3 adapters")
    ours, theirs = rates["engine", 3, 1], rates["PEFT mixed batch", 3, 1]
    expected = sorted(a / b for a, b in zip(ours, theirs, strict=True))
    assert [titled["low"], titled["high"]] == pytest.approx(expected, rel=1e-2)


def test_adapters_change_the_tokens(tmp_path: Path) -> None:
    """Or comparing tokens would prove nothing about adapters."""
    from app.engine.models.checkpoint import load_checkpoint

    torch.manual_seed(0)
    checkpoint = load_checkpoint(save(tiny_model("llama"), tmp_path / "model"))
    settings = Settings(tmp_path / "model", (4,), (2,), (8,), 7, 12, 12, 1, 1, 1, with_reference=False)
    decoder = bench_engine.decoders(settings, checkpoint, tmp_path / "adapters", ExitStack())[bench_engine.ENGINE]
    prompts = np.random.default_rng(2).integers(3, 90, (4, 7)).tolist()
    base, adapted = (decoder.decode(prompts, indices, 12) for indices in ([None] * 4, [0, 1, 0, 1]))
    assert base.token_ids != adapted.token_ids
    assert len(base.step_s) == 11
    assert base.mean_tokens_per_s == pytest.approx(4 * 11 / sum(base.step_s))


def test_random_adapters_have_the_ranks_asked_for(tmp_path: Path) -> None:
    spec = tiny_spec()
    folders = write_random_adapters(tmp_path, spec, 5, (4, 1, 16), seed=3, bf16=True)
    cards = [read_adapter(folder, spec).card for folder in folders]
    assert [card.max_rank for card in cards] == [4, 1, 16, 4, 1]
    assert len({card.digest for card in cards}) == 5
    assert all(len(card.targets) == 7 for card in cards)


class Answers(BaseHTTPRequestHandler):
    """Loads what it is asked for, but not "adapter-0001"."""

    keys: ClassVar[list[str | None]] = []

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.keys.append(self.headers["Authorization"])
        assert self.path == "/v1/load_lora_adapter"
        self.send_response(403 if body["lora_name"] == "adapter-0001" else 200)
        self.end_headers()
        self.wfile.write(b'{"error": {"message": "outside the roots"}}')

    def log_message(self, *_: object) -> None:
        """Quietly."""


@pytest.mark.parametrize("end", ["", "/v1"])
def test_random_adapters_are_loaded_until_one_is_refused(
    end: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tiny_model("llama"), tmp_path / "model")
    Answers.keys.clear()
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    with HTTPServer(("127.0.0.1", 0), Answers) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with pytest.raises(SystemExit, match=r"adapter-0001 was not loaded: HTTP 403: .*outside the roots"):
            random_adapters.main([
                *("--model", str(tmp_path / "model"), "--count", "3", "--ranks", "2", "--out", str(tmp_path / "out")),
                *("--register", f"http://127.0.0.1:{server.server_port}{end}"),
            ])  # fmt: skip
        server.shutdown()
    assert capsys.readouterr().out == "adapter-0000\n"
    assert Answers.keys == ["Bearer secret"] * 2


@pytest.mark.parametrize(
    "given", [["--ranks", "8,x"], ["--ranks", ""], ["--ranks", "0"], ["--seed", "-1"], ["--count", "-3"]]
)
def test_random_adapters_name_bad_options(given: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        random_adapters.main(["--out", str(tmp_path), *given])
    assert given[0] in capsys.readouterr().err


def test_packed_products_are_computed_right_and_checked_for_company() -> None:
    table = bench_matmul.run(tiny_spec(), (1, 3, 4), num_layers=1, num_rounds=2, num_threads=1)
    rows = table.splitlines()[2:]
    assert [row.split("|")[1].strip() for row in rows] == ["1", "3", "4"]
    assert all(f"0 of {4 * m}" in row for m, row in zip((1, 3, 4), rows, strict=True))
    rng = np.random.default_rng(0)
    for product in bench_matmul.products(tiny_spec(), 1, rng):
        width, depth = product.w.shape
        x = rng.standard_normal((3, depth), np.float32)
        ours = bench_matmul.ours(product, x, ThreadTeam(1))[:, :width]
        np.testing.assert_allclose(ours, bench_matmul.linear(product, x), rtol=1e-4, atol=1e-5)


def test_a_row_that_changes_with_its_company_is_counted() -> None:
    (product, *_) = bench_matmul.products(tiny_spec(), 1, np.random.default_rng(0))
    x = np.ones((3, product.w.shape[1]), np.float32)

    def unfaithful(_product: bench_matmul.Product, rows: np.ndarray) -> np.ndarray:
        return rows * np.float32(len(rows))

    assert bench_matmul.changed_rows(unfaithful, product, x) == 3


def test_rounds_run_forwards_and_backwards() -> None:
    order: list[str] = []

    def measuring(name: str) -> Any:
        def measure() -> float:
            order.append(name)
            return float(len(order))

        return measure

    values = rounds({name: measuring(name) for name in "abc"}, 3)
    assert order == list("abc" + "cba" + "abc")
    assert values == {"a": [1, 6, 7], "b": [2, 5, 8], "c": [3, 4, 9]}
    assert ratios(values["a"], values["b"]) == pytest.approx((7 / 8, 1 / 2, 6 / 5))


def test_a_spread_of_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least one round"):
        spread([])
