"""Coverage-guided fuzzing of the adapter readers: any bytes must give an adapter or an `AdapterError`.

Takes a target (weights, config, card) and libFuzzer's options. An input that gives anything else, or takes too long, is
a finding and is written to a file. A card's checksum is forged, so that damage passes it. Needs atheris (`pip install
polylora[fuzz]`).

    python -m load_tests.control.fuzz_adapters weights -max_total_time=120 -max_len=8192 -timeout=10 CORPUS_FOLDER
"""

from __future__ import annotations

import contextlib
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["app.engine.adapters"], enable_loader_override=False):
    from app.engine.adapters.bounded_files import ReadLimits
    from app.engine.adapters.features import FEATURES
    from app.engine.adapters.formats import arrow
    from app.engine.adapters.formats.arrow import CARD_SUFFIX, ArrowCard, write_card
    from app.engine.adapters.formats.peft import read_raw_peft
    from app.engine.adapters.formats.reading import read_adapter
    from app.engine.errors import AdapterError

from tests.engine.adapters.random_adapters import peft_beyond, tiny_spec, write_peft

SPEC = tiny_spec(1)
LIMITS = ReadLimits(max_weight_bytes=1 << 20, max_config_bytes=1 << 16, max_header_bytes=1 << 16, max_tensors=64)
FILES = {"weights": "adapter_model.safetensors", "config": "adapter_config.json"}


def target(name: str, folder: Path) -> tuple[Callable[[bytes], None], list[bytes]]:
    """(the function under test, inputs that are whole) for "weights", "config" or "card"."""
    seeds = []
    for features in ((), ("dora", "saved", "rows"), ("embedding", "rows"), ("lora_bias",)):
        whole = write_peft(folder / "whole", *peft_beyond(SPEC, features=features))
        if name == "card":
            path = folder / f"card{CARD_SUFFIX}"
            write_card(path, ArrowCard("card", read_raw_peft(whole, SPEC), {"author": "me"}))
            seeds.append(path.read_bytes())
        else:
            seeds.append((whole / FILES[name]).read_bytes())
    file = folder / f"card{CARD_SUFFIX}" if name == "card" else folder / "whole" / FILES[name]
    adapter = file if name == "card" else file.parent

    def read(data: bytes) -> None:
        file.unlink()  # a card may still be mapped
        file.write_bytes(data)
        with contextlib.suppress(AdapterError):
            read_adapter(adapter, SPEC, LIMITS, FEATURES)

    return read, seeds


def main() -> None:
    """Command line."""
    arrow._checksum = lambda *_: "0" * 64
    folder = Path(tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    read, seeds = target(sys.argv[1], folder)
    corpus = Path(sys.argv[-1])
    corpus.mkdir(parents=True, exist_ok=True)
    for index, seed in enumerate(seeds):
        (corpus / f"seed{index}").write_bytes(seed)
    try:
        atheris.Setup([sys.argv[0], *sys.argv[2:]], read)
        atheris.Fuzz()
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
