"""Adapters in the layouts of MLX, torchtune, kohya and diffusers, converted: PEFT computes the same logits.

The files are written here as those programs write them: mlx-lm's `save_adapter` (lora.py: y + scale * (x @ a) @ b),
torchtune's `get_adapter_state_dict` (names and rows of `convert_weights.py`), kohya's `LoRANetwork.save_weights`, and
diffusers' `save_lora_weights`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file

from app.cli.main import main
from app.engine.adapters.features import FEATURES
from app.engine.adapters.formats.other_layouts import read_other_layout
from app.engine.adapters.formats.peft import read_raw_peft
from app.engine.adapters.formats.reading import read_adapter
from app.engine.errors import AdapterFormatError
from app.engine.models.checkpoint import load_checkpoint
from tests import seeds
from tests.engine.checkpoints import save, tiny_model

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT's use

RANK, ALPHA = 3, 7.5
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
TUNE = {
    "self_attn.q_proj": "attn.q_proj", "self_attn.k_proj": "attn.k_proj", "self_attn.v_proj": "attn.v_proj",
    "self_attn.o_proj": "attn.output_proj", "mlp.gate_proj": "mlp.w1", "mlp.down_proj": "mlp.w2",
    "mlp.up_proj": "mlp.w3", "lm_head": "output",
}  # fmt: skip
Tensors = dict[str, torch.Tensor]
#: (path, lora_A [r, in], lora_B [out, r], magnitude [out] or None) → tensors of the layout.
Write = Callable[[str, torch.Tensor, torch.Tensor, torch.Tensor | None], Tensors]


class Trained:
    """A base model and an adapter of it, saved by PEFT, with what PEFT computes."""

    def __init__(self, folder: Path, family: str, dtype: torch.dtype = torch.float32, **options: Any) -> None:
        self.folder, self.model = folder, tiny_model(family)
        self.base = save(self.model, folder / "base")
        self.spec = load_checkpoint(self.base).spec
        self.ids = torch.randint(self.spec.vocab_size, (1, 12))
        self.base_logits = self.of(self.model)
        config = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=TARGETS, **options)
        peft = get_peft_model(self.model, config)
        for name, weight in peft.named_parameters():
            if "lora_" in name:
                weight.data = (torch.randn_like(weight) * 0.2 + ("magnitude" in name)).to(dtype).float()
        peft.save_pretrained(folder / "peft")
        self.logits = self.of(peft)
        saved = load_file(folder / "peft" / "adapter_model.safetensors")
        if dtype != torch.float32:
            saved = {name: tensor.to(dtype) for name, tensor in saved.items()}
            save_file(saved, folder / "peft" / "adapter_model.safetensors")
        self.tensors: Tensors = {name.removeprefix("base_model.model."): t for name, t in saved.items()}
        self.plain = peft.unload()

    def of(self, model: Any) -> torch.Tensor:
        with torch.no_grad():
            return model(self.ids).logits

    def write(self, file: Path, write: Write, metadata: Mapping[str, str] | None = None) -> None:
        found: Tensors = {}
        for name, a in self.tensors.items():
            if not name.endswith(".lora_A.weight"):
                continue
            path = name.removesuffix(".lora_A.weight")
            magnitude = self.tensors.get(f"{path}.lora_magnitude_vector")
            found |= write(path, a, self.tensors[f"{path}.lora_B.weight"], magnitude)
        file.parent.mkdir(parents=True, exist_ok=True)
        save_file({name: tensor.contiguous() for name, tensor in found.items()}, file, metadata=dict(metadata or {}))

    def check_converted(self, source: Path, *options: str) -> None:
        """`polylora convert` makes a folder that PEFT reads as the adapter that it saved."""
        target = self.folder / "converted"
        assert main(["convert", str(source), str(target), *options]) == 0
        digests = {
            read_adapter(folder, self.spec, supported_features=FEATURES).card.digest
            for folder in (target, self.folder / "peft")
        }
        assert len(digests) == 1
        logits = self.of(PeftModel.from_pretrained(self.plain, target))
        torch.testing.assert_close(logits, self.logits, rtol=1e-6, atol=1e-6)
        assert not torch.allclose(logits, self.base_logits, atol=1e-2)


def mlx(path: str, a: torch.Tensor, b: torch.Tensor, magnitude: torch.Tensor | None) -> Tensors:
    own = {} if magnitude is None else {f"{path}.m": magnitude}
    return {f"{path}.lora_a": a.T, f"{path}.lora_b": b.T} | own


def mlx_config(folder: Path, kind: str = "lora", **parameters: Any) -> None:
    parameters = {"rank": RANK, "scale": ALPHA / RANK, "dropout": 0.0} | parameters
    config = {"fine_tune_type": kind, "num_layers": 16, "lora_parameters": parameters, "model": "base", "seed": 0}
    (folder / "adapter_config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("kind", "dtype"), [("lora", torch.float32), ("lora", torch.bfloat16), ("dora", torch.float32)]
)
def test_mlx(tmp_path: Path, kind: str, dtype: torch.dtype) -> None:
    trained = Trained(tmp_path, "llama", dtype, use_dora=kind == "dora")
    trained.write(tmp_path / "mlx" / "adapters.safetensors", mlx)
    trained.write(tmp_path / "mlx" / "0000100_adapters.safetensors", mlx)
    mlx_config(tmp_path / "mlx", kind)
    trained.check_converted(tmp_path / "mlx")


def test_older_mlx_scales_by_alpha_over_rank(tmp_path: Path) -> None:
    trained = Trained(tmp_path, "llama")
    trained.write(tmp_path / "mlx" / "adapters.safetensors", mlx)
    mlx_config(tmp_path / "mlx", scale=0.5, alpha=2 * ALPHA)
    trained.check_converted(tmp_path / "mlx")


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_torchtune(tmp_path: Path, family: str) -> None:
    """Llama's rows of q_proj and k_proj lie as for Meta's rotary embedding, of neighbours; Qwen's do not."""
    trained = Trained(tmp_path, family)
    heads = {
        "q_proj": trained.spec.layers[0].attention.num_heads,
        "k_proj": trained.spec.layers[0].attention.num_kv_heads,
    }

    def write(path: str, a: torch.Tensor, b: torch.Tensor, _: torch.Tensor | None) -> Tensors:
        _, _, layer, module = path.split(".", 3)
        name = f"layers.{layer}.{TUNE[module]}"
        num = heads.get(module.rpartition(".")[2])
        if num is not None and family == "llama":
            rows = len(b) // num
            b = b.view(num, 2, rows // 2, RANK).transpose(1, 2).reshape(len(b), RANK)  # torchtune's `_permute`
        return {f"{name}.lora_a.weight": a, f"{name}.lora_b.weight": b}

    trained.write(tmp_path / "tune" / "adapter_0.safetensors", write)
    config = {"r": RANK, "lora_alpha": ALPHA, "target_modules": ["q_proj", "output_proj", "w1"], "peft_type": "LORA"}
    (tmp_path / "tune" / "adapter_config.json").write_text(json.dumps(config))
    trained.check_converted(tmp_path / "tune", "--base", str(trained.base))
    with pytest.raises(AdapterFormatError, match="name the base with --base"):
        read_other_layout(tmp_path / "tune" / "adapter_0.safetensors", None)


def test_the_rows_of_torchtunes_queries_and_keys_keep_every_product() -> None:
    """A head's query times its key, after Meta's rotation of neighbours and after transformers' of halves."""
    from app.engine.adapters.formats.other_layouts import _halves_apart
    from tests.engine.adapters.random_adapters import stored_tensor

    rng = seeds.rng()
    angles = rng.uniform(0, 7, (2, 4))  # of a query's and of a key's position, for head_dim 8
    query, key = rng.standard_normal((2, 8)).astype(np.float32)

    def neighbours(x: NDArray[np.float64], angle: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.stack(
            [x[0::2] * np.cos(angle) - x[1::2] * np.sin(angle), x[1::2] * np.cos(angle) + x[0::2] * np.sin(angle)]
        )

    def halves(x: NDArray[np.float64], angle: NDArray[np.float64]) -> NDArray[np.float64]:
        first, second = x[:4], x[4:]
        return np.concatenate(
            [first * np.cos(angle) - second * np.sin(angle), second * np.cos(angle) + first * np.sin(angle)]
        )

    def ours(x: NDArray[np.float32]) -> NDArray[np.float64]:
        return _halves_apart(stored_tensor(x), 8, "").to_float32().astype(np.float64)

    theirs = np.sum(neighbours(query.astype(np.float64), angles[0]) * neighbours(key.astype(np.float64), angles[1]))
    assert math.isclose(np.sum(halves(ours(query), angles[0]) * halves(ours(key), angles[1])), theirs, rel_tol=1e-9)


@pytest.mark.parametrize("prefix", ["lora_te_", "lora_te1_model_", "lora_model_"])
@pytest.mark.parametrize("alpha", [ALPHA, float(RANK)])
def test_kohya(tmp_path: Path, prefix: str, alpha: float) -> None:
    trained = Trained(tmp_path, "llama")
    config = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    (tmp_path / "peft" / "adapter_config.json").write_text(json.dumps(config | {"lora_alpha": alpha}))

    def write(path: str, a: torch.Tensor, b: torch.Tensor, _: torch.Tensor | None) -> Tensors:
        name = prefix + path.removeprefix("model.").replace(".", "_")
        own = {} if alpha == RANK else {f"{name}.alpha": torch.tensor(alpha)}  # the rank, if there is none
        return {f"{name}.lora_down.weight": a, f"{name}.lora_up.weight": b} | own

    trained.write(tmp_path / "lora.safetensors", write)
    raw = read_other_layout(tmp_path / "lora.safetensors", None)
    assert raw.modules == read_raw_peft(tmp_path / "peft", None).modules
    if alpha == ALPHA:
        trained.check_converted(tmp_path / "lora.safetensors")


@pytest.mark.parametrize(
    "halves",
    [
        ("lora_A", "lora_B"),
        ("lora_linear_layer.down", "lora_linear_layer.up"),
        ("lora.down", "lora.up"),
    ],
)
@pytest.mark.parametrize("prefix", ["text_encoder.", "text_encoder_2.model.", "language_model.model."])
def test_diffusers(tmp_path: Path, halves: tuple[str, str], prefix: str) -> None:
    trained = Trained(tmp_path, "llama")

    def write(path: str, a: torch.Tensor, b: torch.Tensor, _: torch.Tensor | None) -> Tensors:
        name = prefix + path.removeprefix("model.")
        return {f"{name}.{halves[0]}.weight": a, f"{name}.{halves[1]}.weight": b}

    component = prefix.partition(".")[0]
    metadata = {f"{component}.r": RANK, f"{component}.lora_alpha": ALPHA, f"{component}.use_rslora": False}
    weights = tmp_path / "diffusers" / "pytorch_lora_weights.safetensors"
    trained.write(weights, write, {"format": "pt", "lora_adapter_metadata": json.dumps(metadata)})
    assert read_other_layout(weights, None).modules == read_raw_peft(tmp_path / "peft", None).modules
    trained.write(weights, write)
    assert {module.scale for module in read_other_layout(weights, None).modules} == {1.0}, "alpha is the rank"


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["x.lora_c"], "'x.lora_c' is in no layout"),
        (["model.layers.0.mlp.up_proj.lora_a", "layers.0.mlp.w1.lora_a.weight"], "of several layouts"),
        (["lora_unet_down_blocks_0_attentions_0_proj_in.lora_down.weight"], "kohya's files of image models"),
        (["layers.0.attn.wqkv.lora_a.weight"], "no module of torchtune's"),
        (["unet.a.layers.0.q.lora_A.weight", "text_encoder.layers.0.q.lora_A.weight"], "adapts several models"),
        (["lora_te_layers_0_mlp_up_proj.lora_down.weight"], "lacks one of its two matrices"),
        (["lora_te_layers_0_mlp_up_proj.alpha"], "or of none"),
    ],
)
def test_what_is_in_no_layout_is_refused_by_name(tmp_path: Path, names: list[str], message: str) -> None:
    save_file({name: torch.zeros(2, 2) for name in names}, tmp_path / "adapter.safetensors")
    with pytest.raises(AdapterFormatError, match=message):
        read_other_layout(tmp_path / "adapter.safetensors", None)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"fine_tune_type": "full"}, "must have fine_tune_type"),
        ({"lora_parameters": {"rank": 8}}, "must have fine_tune_type"),
        ({"lora_parameters": {"scale": True}}, "must have fine_tune_type"),
        ({"lora_parameters": {"scale": 2, "alpha": "x"}}, "alpha is 'x'"),
    ],
)
def test_a_scale_that_is_not_said_is_not_guessed(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    name = "model.layers.0.mlp.up_proj"
    save_file(
        {f"{name}.lora_a": torch.ones(4, 2), f"{name}.lora_b": torch.ones(2, 6)}, tmp_path / "adapters.safetensors"
    )
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(AdapterFormatError, match=message):
        read_other_layout(tmp_path / "adapters.safetensors", None)


def test_a_server_says_how_to_convert_them(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    save_file({"x.lora_a": torch.zeros(2, 2)}, tmp_path / "adapters.safetensors")
    with pytest.raises(AdapterFormatError, match=r"adapters\.safetensors' instead of .*`polylora convert`"):
        read_raw_peft(tmp_path, None)
