"""Signatures: unsigned, altered and strangers' adapters are refused where they must be, from any source."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from app.cli import main as cli
from app.config import load_config
from app.deployments.store.adapter_reader import AdapterReader
from app.deployments.store.sources.hub import HubFetcher
from app.deployments.store.sources.urls import UrlFetcher
from app.engine.adapters.card import AdapterCard
from app.engine.adapters.features import FEATURES
from app.engine.adapters.formats.arrow import CARD_SUFFIX, ArrowCard, write_card
from app.engine.adapters.formats.peft import read_raw_peft
from app.engine.adapters.formats.reading import read_adapter
from app.engine.adapters.signing.signing import public_key, sign, signature_path
from app.engine.adapters.signing.trusted_keys import TrustedKeys
from app.engine.errors import AdapterUntrusted, ConfigError
from tests.deployments.store.sources.conftest import SPEC, OpenLibrary, Store, new_adapter
from tests.deployments.store.sources.servers import FileServer, HubServer
from tests.engine.adapters.random_adapters import peft_config, peft_tensors, random_arrays, write_peft
from tests.engine.checkpoints import save, tiny_model


@pytest.fixture
def key() -> Ed25519PrivateKey:
    return Ed25519PrivateKey.generate()


@pytest.fixture
def library(open_library: OpenLibrary) -> AdapterReader:
    return open_library(signatures=True)


@pytest.fixture
def store(store: Store, key: Ed25519PrivateKey) -> Store:
    store._trusted = TrustedKeys(True, {"default": [public_key(key)], "other": []})
    return store


async def test_only_what_a_trusted_key_signed_is_registered(
    tmp_path: Path, store: Store, card: AdapterCard, key: Ed25519PrivateKey
) -> None:
    folder = tmp_path / "original"
    with pytest.raises(AdapterUntrusted, match="not signed"):
        await store.register("a", "original")
    assert store.cached_digests == (), "what is refused takes no host memory"
    signature_path(folder).write_text(sign(card.digest, Ed25519PrivateKey.generate()))
    with pytest.raises(AdapterUntrusted, match="no trusted key of tenant 'default'"):
        await store.register("a", "original")
    line = sign(card.digest, key)
    signature_path(folder).write_text(line)
    assert (await store.register("a", "original")).ref.digest == card.digest
    with pytest.raises(AdapterUntrusted, match="'other'"):
        await store.register("a", "original", "other")
    assert store.cached_digests == (card.digest,), "others have it"
    new_adapter(folder)  # other weights under the old signature
    with pytest.raises(AdapterUntrusted, match="altered"):
        await store.register("a", "original")
    assert [entry.ref.digest for entry in store.entries()] == [card.digest]


@pytest.mark.parametrize("damage", ["bit", "empty", "long", "text", "link", "of another", "folder"])
async def test_a_signature_that_is_none(
    tmp_path: Path, store: Store, card: AdapterCard, key: Ed25519PrivateKey, damage: str
) -> None:
    path = signature_path(tmp_path / "original")
    line = sign(card.digest, key)
    flipped = line[:70] + ("A" if line[70] != "A" else "B") + line[71:]
    contents = {
        "bit": flipped,
        "empty": "",
        "long": line + "x" * 5000,
        "text": "ed25519 a b",
        "of another": sign("0" * 64, key),
    }
    if damage == "link":
        (tmp_path / "elsewhere").write_text(line)
        path.symlink_to(tmp_path / "elsewhere")
    elif damage == "folder":
        path.mkdir()
    else:
        path.write_text(contents[damage])
    with pytest.raises(Exception, match=r"signature|altered|link|bytes|regular|open") as caught:
        await store.register("a", "original")
    assert type(caught.value).__name__.startswith("Adapter")
    assert store.entries() == []


def test_signatures_travel_with_every_source(
    tmp_path: Path,
    open_library: OpenLibrary,
    server: FileServer,
    hub: HubServer,
    files: dict[str, bytes],
    card: AdapterCard,
    key: Ed25519PrivateKey,
) -> None:
    line = sign(card.digest, key).encode()
    path = tmp_path / f"x{CARD_SUFFIX}"
    write_card(path, ArrowCard("x", read_raw_peft(tmp_path / "original", SPEC), {}))
    (tmp_path / f"x{CARD_SUFFIX}.sig").write_bytes(line)
    server.files |= {f"/a/{name}": contents for name, contents in files.items()} | {"/a/adapter.sig": line}
    server.files |= {f"/b/{name}": contents for name, contents in files.items()}
    server.files |= {f"/{path.name}": path.read_bytes(), f"/{path.name}.sig": line}
    hub.commit("o/folder", "main", files | {"adapter.sig": line})
    hub.commit("o/card", "main", {path.name: path.read_bytes(), f"{path.name}.sig": line})
    options = {"max_bytes": 1 << 20, "timeout_s": 120.0}
    url = UrlFetcher([f"{server.url}/"], options={}, signatures=True, max_bytes=1 << 20, timeout_s=120)
    library = open_library(url, HubFetcher(hub.url, None, **options), signatures=True)  # type: ignore[arg-type]
    signed = [f"{server.url}/a", f"{server.url}/{path.name}", "hf://o/folder@main", "hf://o/card@main", path.name]
    for source in signed:
        located = library.from_source(source)
        assert (located.packed.card.digest, located.signer) == (card.digest, public_key(key)), source
    assert library.from_source(f"{server.url}/b").signer is None


async def test_a_resized_vocabulary_is_signed_with_its_weights(
    tmp_path: Path, open_library: OpenLibrary, key: Ed25519PrivateKey
) -> None:
    """Its size is in the adapter's text, of which signatures cover nothing else."""
    num_rows = SPEC.vocab_size + 2
    tensors = peft_tensors(random_arrays(SPEC, 2, ["q_proj"]))
    embeddings = np.random.default_rng(1).standard_normal((num_rows, SPEC.hidden_size), np.float32)
    tensors["base_model.model.model.embed_tokens.weight"] = embeddings
    folder = write_peft(tmp_path / "grown", peft_config(2, ["q_proj"]), tensors)
    digest = read_adapter(folder, SPEC, supported_features=FEATURES).card.digest
    signature_path(folder).write_text(sign(digest, key))
    library = open_library(signatures=True, features=FEATURES)
    located = library.from_source("grown")
    assert (located.packed.card.digest, located.signer) == (digest, public_key(key))
    assert located.packed.card.vocab_size == num_rows
    (folder / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    with pytest.raises(AdapterUntrusted, match="chat template"):
        library.from_source("grown")


def test_the_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from app.engine.models.checkpoint import load_checkpoint
    from load_tests.random_adapters import write_random_adapter

    base = save(tiny_model("llama"), tmp_path / "model")
    folder = write_random_adapter(tmp_path / "adapter", load_checkpoint(base).spec, 4, 1)
    key = tmp_path / "signing.pem"
    assert cli.main(["keygen", str(key)]) == 0
    public = capsys.readouterr().out.strip()
    assert key.stat().st_mode & 0o077 == 0
    trusted = load_config({"adapters": {"signing": {"required": True, "trusted_keys": {"default": [public]}}}})
    assert trusted.adapters.signing.trust.keys == {"default": (public,)}
    with pytest.raises(ConfigError, match="trusted_keys"):
        load_config({"adapters": {"signing": {"trusted_keys": {"default": ["short"]}}}})
    assert cli.main(["keygen", str(key)]) == 1, "a key is never overwritten"
    arguments = ["sign", str(folder), "--base", str(base), "--key"]
    assert cli.main([*arguments, str(key)]) == 0
    assert public in capsys.readouterr().out
    assert (folder / "adapter.sig").read_text().startswith(f"ed25519 {public} ")
    other = X25519PrivateKey.generate().private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    (tmp_path / "other.pem").write_bytes(other)
    for bad in ("other.pem", "none.pem", "adapter/adapter.sig"):
        assert cli.main([*arguments, str(tmp_path / bad)]) == 1
