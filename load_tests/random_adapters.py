"""Random LoRA adapters as PEFT folders: as many as a measurement needs, of any ranks.

Their contents mean nothing; their sizes are real. The command line prints their names, one a line, as
`load_tests.http.run --models @FILE` reads them, and can register them with a service that reads that folder:

    python -m load_tests.random_adapters --count 100 --ranks 8,16,32,64 --out /tmp/adapters \
        --register http://127.0.0.1:8000/v1 > names.txt
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from app.engine.adapters.modules import layer_modules
from app.engine.models.checkpoint import load_checkpoint
from app.engine.models.download.model_download import DEFAULT_MODEL_URI, resolve_model
from app.engine.models.linear_modules import DENSE_TARGETS, ENCODER_TARGETS
from app.engine.models.spec import ModelSpec
from load_tests.stats import numbers


def write_random_adapter(
    folder: Path, spec: ModelSpec, rank: int, seed: int, targets: Sequence[str] | None = None, bf16: bool = False
) -> Path:
    """One adapter over `targets` of every layer, None for all there are; lora_alpha equals the rank. Returns `folder`.

    A is N(0, 1/d_in) and B N(0, 0.05²/r): a delta of about a twentieth of the input's size, enough to
    change the tokens, too little to make the hidden states explode.
    """
    rng = np.random.default_rng(seed)
    kind = ml_dtypes.bfloat16 if bf16 else np.float32
    tensors = {}
    is_encoder = spec.encoder is not None
    if targets is None:
        targets = ENCODER_TARGETS if is_encoder else DENSE_TARGETS
    for module_path, module in layer_modules(spec).items():
        if not module.is_fused and module.targets[0] in targets:
            d_in, (d_out,) = module.shape(spec)
            path = f"base_model.model.{module_path}"
            a = rng.standard_normal((rank, d_in), np.float32) * d_in**-0.5
            b = rng.standard_normal((d_out, rank), np.float32) * 0.05 * rank**-0.5
            tensors[f"{path}.lora_A.weight"] = a.astype(kind)
            tensors[f"{path}.lora_B.weight"] = b.astype(kind)
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "peft_type": "LORA",
        "task_type": "FEATURE_EXTRACTION" if is_encoder else "CAUSAL_LM",
        "base_model_name_or_path": spec.name,
        "r": rank,
        "lora_alpha": rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
        "target_modules": list(targets),
    }
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=1))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def write_random_adapters(
    root: Path, spec: ModelSpec, count: int, ranks: Sequence[int], seed: int, bf16: bool = False
) -> list[Path]:
    """`count` adapters named adapter-0000 and so on; ranks are taken in turn."""
    return [
        write_random_adapter(root / f"adapter-{i:04}", spec, ranks[i % len(ranks)], seed + i, bf16=bf16)
        for i in range(count)
    ]


def register(url: str, folder: Path) -> None:
    """Load an adapter under its folder's name (vLLM's route), with the key in OPENAI_API_KEY. Raises OSError, with
    the service's words where it refuses."""
    body = json.dumps({"lora_name": folder.name, "lora_path": str(folder.absolute())}).encode()
    headers = {
        "Content-Type": "application/json",
        "Authorization": f"Bearer {os.environ.get('OPENAI_API_KEY', 'none')}",
    }
    route = f"{url.rstrip('/').removesuffix('/v1')}/v1/load_lora_adapter"
    request = urllib.request.Request(route, data=body, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=60):
            pass
    except urllib.error.HTTPError as error:
        words = error.read().decode(errors="replace")
        raise OSError(f"{folder.name} was not loaded: HTTP {error.code}: {words[:500]}") from error


def main(argv: Sequence[str] | None = None) -> None:
    """Command line. Exits with 2 for options not understood, 1 when an adapter cannot be loaded."""
    parser = argparse.ArgumentParser(description="Write random adapters as PEFT folders.")
    parser.add_argument("--model", default=DEFAULT_MODEL_URI, help="path or source URI of the base model")
    parser.add_argument("--count", type=int, default=8)
    parser.add_argument("--ranks", type=numbers, default=(8, 16, 32, 64), help="8,16,32,64: taken in turn")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--register", metavar="URL", help="a service that may read the folder")
    arguments = parser.parse_args(argv)
    if arguments.seed < 0 or not arguments.ranks or arguments.count < 1:
        parser.error("--seed must be at least 0, --count at least 1, and --ranks must name one rank at least")
    spec = load_checkpoint(resolve_model(arguments.model)).spec
    for index in range(arguments.count):
        rank = arguments.ranks[index % len(arguments.ranks)]
        folder = arguments.out / f"adapter-{index:04}"
        write_random_adapter(folder, spec, rank, arguments.seed + index, bf16=True)
        if arguments.register:
            try:
                register(arguments.register, folder)
            except OSError as error:
                sys.exit(str(error))
        print(folder.name, flush=True)


if __name__ == "__main__":
    main()
