"""A backend whose tokens come out of its own memory, so that a wrong block or row gives a wrong token.

`FakeBackend` keeps one number per KV slot and one per rank row. The number stored for a token is
mixed from the token, its position, the rows of its run's adapter and the number of the token before
it, read back through the block table. The token drawn is mixed from every number the sequence can
see, read back the same way. A stale block, a wrong table entry, a reused row or a run that belongs
to another adapter changes it. `fake_tokens` computes the same from the definition, without memory.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from app.engine.adapters.adapter import LoraAdapter, LoraKey, LoraPair
from app.engine.adapters.card import AdapterCard, AdapterRef
from app.engine.backend import BackendLimits
from app.engine.batch import ForwardBatch, ForwardOutput, SamplingBatch
from app.engine.models.spec import AttentionSpec, LayerSpec, MlpSpec, ModelSpec, RopeSpec
from app.engine.request import GenerateRequest, PoolingParams, SamplingParams, TokenLogprobs

VOCAB = 61
EOS = 7
#: The base's digest.
FAKE_BASE = "fa4eba5e" * 8
_MASK = (1 << 64) - 1


def fake_spec(*, max_positions: int = 512) -> ModelSpec:
    """A one-layer decoder that exists only in name."""
    attention = AttentionSpec(num_heads=1, num_kv_heads=1, head_dim=4, scale=0.5, rope=RopeSpec((1.0, 0.1)))
    return ModelSpec(
        name="fake",
        family="llama",
        digest=FAKE_BASE,
        vocab_size=VOCAB,
        hidden_size=4,
        max_positions=max_positions,
        norm_eps=1e-5,
        tie_embeddings=True,
        layers=(LayerSpec(attention, MlpSpec(8)),),
        bos_token_id=None,
        eos_token_ids=(EOS,),
    )


def fake_adapter(
    name: str,
    rank: int,
    *,
    size_bytes: int | None = None,
    base_digest: str = FAKE_BASE,
    invocation: tuple[int, ...] = (),
    labels: int = 0,
) -> LoraAdapter:
    """An adapter whose rows hold numbers of their own; with a score head, if it has labels."""
    digest = hashlib.sha256(f"{name}/{rank}".encode()).hexdigest()
    rows = np.frombuffer(hashlib.shake_256(digest.encode()).digest(2 * rank), np.uint16).astype(np.float32)
    pair = LoraPair(rows.reshape(rank, 1), np.ones((rank, 1), np.float32))
    size = pair.a.nbytes + pair.b.nbytes if size_bytes is None else size_bytes
    card = AdapterCard(digest, base_digest, rank, ("q_proj",), "float32", size, invocation_tokens=invocation)
    head = {"score.weight": np.arange(1, 4 * labels + 1, dtype=np.float32).reshape(labels, 4) - 2} if labels else {}
    return LoraAdapter(card, {LoraKey(0, "q_proj"): pair}, replaced=head)


def fake_request(
    request_id: str,
    token_ids: Sequence[int],
    adapter: LoraAdapter | None = None,
    *,
    sampling: SamplingParams | None = None,
    tenant_id: str = "default",
    weight: float = 1.0,
    cache_salt: bytes = b"",
    resume_token_ids: Sequence[int] = (),
    pooling: PoolingParams | None = None,
    is_batch: bool = False,
) -> GenerateRequest:
    ref = AdapterRef("an-adapter", adapter.card.digest, tenant_id) if adapter is not None else None
    return GenerateRequest(
        request_id,
        tenant_id,
        tuple(token_ids),
        sampling or SamplingParams(temperature=0.0),
        ref,
        weight,
        cache_salt,
        resume_token_ids=tuple(resume_token_ids),
        pooling=pooling,
        is_batch=is_batch,
    )


class FakeBackend:
    """Memory with the shape of a backend's and arithmetic that forgets nothing."""

    def __init__(self, limits: BackendLimits, spec: ModelSpec | None = None) -> None:
        self._spec = spec or fake_spec()
        self._limits = limits
        num_kv_slots = limits.num_kv_blocks * limits.block_size
        self._kv = [hash(("never written", i)) & _MASK for i in range(num_kv_slots)]
        self._rows = [0.5] * limits.lora_pool_rows
        self._runs: dict[int, tuple[int, int]] = {0: (0, 0)}
        self.num_forwards = 0
        self.trims: list[int] = []  # forwards before each
        self.batches: list[ForwardBatch] = []
        self.keep_batches = False
        self.writes: list[tuple[int, int, int]] = []  # (forwards before it, adapter slot, bytes)
        self.releases: list[int] = []
        self.unready: set[int] = set()
        self.overflowing: set[int] = set()  # adapter slots whose arithmetic does
        self.fail_at: int | None = None
        self.write_error: Exception | None = None
        self.closed = False
        self.compile_s = 0.0
        self.prepared: list[LoraAdapter] = []

    @property
    def spec(self) -> ModelSpec:
        return self._spec

    @property
    def limits(self) -> BackendLimits:
        return self._limits

    def prepare_adapter(self, adapter: LoraAdapter) -> None:
        self.prepared.append(adapter)

    def write_adapter(self, adapter_slot: int, row_start: int, adapter: LoraAdapter) -> None:
        if self.write_error is not None:
            raise self.write_error
        rank = adapter.card.max_rank
        assert 0 < adapter_slot < self._limits.max_loras
        assert row_start % self._limits.rank_alignment == 0
        assert row_start + rank <= self._limits.lora_pool_rows
        self._rows[row_start : row_start + rank] = adapter.weights[LoraKey(0, "q_proj")].a[:, 0].tolist()
        self._runs[adapter_slot] = (row_start, rank)
        self.writes.append((self.num_forwards, adapter_slot, adapter.card.size_bytes))

    def is_ready(self, adapter_slot: int) -> bool:
        return adapter_slot not in self.unready

    def release_adapter(self, adapter_slot: int) -> None:
        self.releases.append(adapter_slot)

    def trim_memory(
        self, kept_blocks: Collection[int], kept_rows: Collection[tuple[int, int]], should_stop: Callable[[], bool], /
    ) -> bool:
        """Forget what need not be kept, unless work has come since."""
        if should_stop():
            return True
        self.trims.append(self.num_forwards)
        block_size = self._limits.block_size
        self._kv = [value if i // block_size in kept_blocks else 3 for i, value in enumerate(self._kv)]
        kept = {row for first, end in kept_rows for row in range(first, end)}
        self._rows = [value if row in kept else 0.5 for row, value in enumerate(self._rows)]
        return True

    def forward(self, batch: ForwardBatch) -> ForwardOutput:
        if self.fail_at is not None and self.num_forwards >= self.fail_at:
            raise RuntimeError("the fake device is on fire")
        check_batch(batch, self._limits)
        self.num_forwards += 1
        if self.keep_batches:
            self.batches.append(batch)
        block_size = self._limits.block_size
        marks = np.repeat(batch.run_adapter_slots, np.diff(batch.run_starts)).tolist()
        keys_of: list[list[int]] = []
        for index in range(len(batch.seq_lens)):
            table = batch.block_tables[index].tolist()
            length = int(batch.seq_lens[index])
            kv_slots = [table[p // block_size] * block_size + p % block_size for p in range(length)]
            first, last = int(batch.query_starts[index]), int(batch.query_starts[index + 1])
            for row in range(first, last):
                position = int(batch.positions[row])
                assert int(batch.kv_slots[row]) == kv_slots[position]
                before = self._kv[kv_slots[position - 1]] if position else 0
                start, rank = self._runs[marks[row]]
                value = token_value(before, int(batch.token_ids[row]), position, self._rows[start : start + rank])
                self._kv[int(batch.kv_slots[row])] = value
            keys_of.append(kv_slots)
        states = [
            _mix([self._kv[s] for s in keys_of[int(i)][: int(batch.positions[row]) + 1]])
            for i, row in zip(batch.sample_seqs, batch.sample_rows, strict=True)
        ]
        drawn = [_draw(state, batch.sampling, row) for row, state in enumerate(states)]
        return ForwardOutput(
            np.array([line.token_id for line in drawn], np.int32),
            np.array([line.logprob for line in drawn], np.float32),
            tuple(
                (np.array([i for i, _ in line.top], np.int32), np.array([x for _, x in line.top], np.float32))
                if line.top
                else None
                for line in drawn
            ),
            tuple(row for row, i in enumerate(batch.sample_rows) if marks[i] in self.overflowing),
            self._sums(batch, marks),
            None if batch.sampling.targets is None else np.array([line.rank for line in drawn], np.int32),
        )

    def _sums(self, batch: ForwardBatch, marks: list[int]) -> NDArray[np.float64] | None:
        if batch.pooling is None:
            return None
        sums = batch.pooling.sums.copy()
        for q, (first, end) in enumerate(batch.pooling.ranges.tolist()):
            for row in range(first, end):
                sums[q] += np.inf if marks[row] in self.overflowing else fake_state(self._kv[int(batch.kv_slots[row])])
        return sums

    def close(self) -> None:
        self.closed = True


def token_value(before: int, token_id: int, position: int, rows: Sequence[float]) -> int:
    """What is stored for one token."""
    value = (before * 6364136223846793005 + token_id * 1442695040888963407 + position * 2654435761 + 12345) & _MASK
    for index, row in enumerate(rows):
        value = (value * 31 + (index + 1) * int(row * 2)) & _MASK
    return value ^ (value >> 29)


def fake_state(value: int) -> NDArray[np.float64]:
    """The hidden state of a token whose stored number this is."""
    return np.array([(value >> 16 * index & 0xFFFF) / 65536 - 0.5 for index in range(4)])


def fake_rows(request: GenerateRequest, adapter: LoraAdapter | None) -> Callable[[int], list[float]]:
    """The adapter's numbers for a position: none before the last occurrence of its invocation in the prompt."""
    if adapter is None:
        return lambda _: []
    own = adapter.weights[LoraKey(0, "q_proj")].a[:, 0].tolist()
    prompt, wanted = tuple(request.token_ids), adapter.card.invocation_tokens
    starts = [at for at in range(len(prompt)) if prompt[at : at + len(wanted)] == wanted] if wanted else [0]
    return lambda position: own if starts and position >= starts[-1] else []


def fake_embedding(request: GenerateRequest, adapter: LoraAdapter | None) -> bytes:
    """What `FakeBackend` must answer to a request with pooling."""
    assert request.pooling is not None
    rows = fake_rows(request, adapter)
    values: list[int] = []
    for position, token_id in enumerate(request.token_ids):
        values.append(token_value(values[-1] if values else 0, token_id, position, rows(position)))
    if request.pooling.task != "embed":
        assert adapter is not None
        return (adapter.replaced["score.weight"] * fake_state(values[-1])).sum(axis=1).astype("<f4").tobytes()
    chosen = values if request.pooling.method == "mean" else values[-1:]
    total = np.zeros(4)
    for value in chosen:
        total += fake_state(value)
    total = (total / len(chosen))[: request.pooling.num_dimensions]
    return (total / math.sqrt(math.fsum((total * total).tolist()))).astype("<f4").tobytes()


def check_batch(batch: ForwardBatch, limits: BackendLimits) -> None:
    """What `ForwardBatch` promises."""
    num_tokens, num_seqs, num_drawn = len(batch.token_ids), len(batch.seq_lens), len(batch.sample_rows)
    assert num_tokens > 0
    assert len(batch.positions) == len(batch.kv_slots) == num_tokens
    assert len(set(batch.kv_slots.tolist())) == num_tokens, "two tokens in one place"
    assert batch.query_starts[0] == 0
    assert batch.query_starts[-1] == num_tokens
    assert (np.diff(batch.query_starts) > 0).all()
    assert batch.block_tables.shape[0] == num_seqs
    assert batch.block_tables.max() < limits.num_kv_blocks
    assert batch.run_starts[0] == 0
    assert batch.run_starts[-1] == num_tokens
    assert (np.diff(batch.run_starts) > 0).all()
    assert (np.diff(batch.run_adapter_slots) != 0).all(), "runs of neighbours differ"
    within = set(batch.run_starts.tolist()) - set(batch.query_starts.tolist())
    slots = dict(zip(batch.run_starts.tolist(), batch.run_adapter_slots.tolist(), strict=False))
    assert all(slots[start] > 0 for start in within), "within a sequence an adapter begins, and none ends"
    bounds = zip(batch.query_starts[:-1].tolist(), batch.query_starts[1:].tolist(), strict=True)
    assert all(sum(first < start < end for start in within) <= 1 for first, end in bounds)
    own = batch.run_adapter_slots[batch.run_adapter_slots > 0]
    assert (np.diff(own) >= 0).all(), "runs of adapters are sorted"
    for index in range(num_seqs):
        first, last = batch.query_starts[index], batch.query_starts[index + 1]
        expected = np.arange(batch.seq_lens[index] - (last - first), batch.seq_lens[index])
        assert (batch.positions[first:last] == expected).all()
    targets = np.full(num_drawn, -1) if batch.sampling.targets is None else batch.sampling.targets
    assert (np.diff(batch.sample_rows) != 0).all()
    draws = targets < 0
    if not limits.num_draft_rows:
        assert (np.diff(batch.sample_seqs[draws]) > 0).all()
    assert draws.sum() <= num_seqs + limits.num_draft_rows
    for index, row, target in zip(batch.sample_seqs, batch.sample_rows, targets, strict=True):
        assert batch.query_starts[index] <= row < batch.query_starts[index + 1]
        if target >= 0 and row + 1 < batch.query_starts[index + 1]:
            assert batch.token_ids[row + 1] == target
    for index in set(batch.sample_seqs[draws].tolist()):
        rows, end = batch.sample_rows[draws & (batch.sample_seqs == index)], batch.query_starts[index + 1]
        assert rows.tolist() == list(range(end - len(rows), end)), "the last of its sequence"
    sampling = batch.sampling
    assert len(sampling.history) == num_drawn
    for array in (
        sampling.temperature,
        sampling.seeds,
        sampling.positions,
        sampling.num_logprobs,
        sampling.prompt_lens,
    ):
        assert len(array) == num_drawn
    assert (sampling.positions == batch.positions[batch.sample_rows] + 1).all()
    dtypes = [batch.token_ids.dtype, batch.positions.dtype, batch.block_tables.dtype, batch.query_starts.dtype]
    assert all(dtype == np.int32 for dtype in dtypes)
    assert batch.kv_slots.dtype == np.int64


def fake_tokens(request: GenerateRequest, adapter: LoraAdapter | None) -> list[TokenLogprobs]:
    """What `FakeBackend` must answer, token by token, resumed ones left out."""
    params = request.sampling
    tokens = [*request.token_ids, *request.resume_token_ids]
    rows = fake_rows(request, adapter)
    values: list[int] = []
    out: list[TokenLogprobs] = []
    stops = set(params.stop_token_ids) | (set() if params.ignore_eos else {EOS})
    has_penalty = (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) != (0, 0, 1)
    while len(tokens) - len(request.token_ids) < params.max_tokens:
        if len(tokens) > len(request.token_ids) and tokens[-1] in stops:
            break
        while len(values) < len(tokens):
            position = len(values)
            values.append(token_value(values[-1] if values else 0, tokens[position], position, rows(position)))
        history = np.array(tokens if has_penalty else [], np.int32)
        sampling = SamplingBatch(
            temperature=np.array([params.temperature], np.float32),
            top_p=np.array([params.top_p], np.float32),
            top_k=np.array([params.top_k], np.int32),
            min_p=np.array([params.min_p], np.float32),
            presence=np.array([params.presence_penalty], np.float32),
            frequency=np.array([params.frequency_penalty], np.float32),
            repetition=np.array([params.repetition_penalty], np.float32),
            seeds=np.array([params.seed], np.uint64),
            positions=np.array([len(tokens)], np.int64),
            num_logprobs=np.array([-1 if params.num_logprobs is None else params.num_logprobs], np.int32),
            history=(history,),
            prompt_lens=np.array([len(request.token_ids)], np.int32),
        )
        line = _draw(_mix(values), sampling, 0)
        out.append(line)
        tokens.append(line.token_id)
    return out


def fake_prompt_logprobs(request: GenerateRequest, adapter: LoraAdapter | None) -> list[TokenLogprobs]:
    """What `FakeBackend` must say of the prompt's tokens but the first."""
    rows, tokens, values, found = fake_rows(request, adapter), request.token_ids, list[int](), list[TokenLogprobs]()
    single, none = np.ones(1, np.float32), np.zeros(1, np.int32)
    for position in range(len(tokens) - 1):
        values.append(token_value(values[-1] if values else 0, tokens[position], position, rows(position)))
        sampling = SamplingBatch(
            temperature=0 * single, top_p=single, top_k=none, min_p=0 * single, presence=0 * single,
            frequency=0 * single, repetition=single, seeds=np.zeros(1, np.uint64), positions=np.zeros(1, np.int64),
            num_logprobs=np.array([request.sampling.prompt_logprobs], np.int32), history=(none[:0],), prompt_lens=none,
            targets=np.array([tokens[position + 1]], np.int32),
        )  # fmt: skip
        found.append(_draw(_mix(values), sampling, 0))
    return found


def _mix(values: list[int]) -> int:
    state = len(values)
    for value in values:
        state = (state * 0x9E3779B97F4A7C15 + value) & _MASK
        state ^= state >> 31
    return state


def _draw(state: int, sampling: SamplingBatch, row: int) -> TokenLogprobs:
    """Every sampling field leaves its mark on the token."""
    temperature = float(sampling.temperature[row])
    marks: list[object] = [
        temperature,
        float(sampling.top_p[row]),
        int(sampling.top_k[row]),
        float(sampling.min_p[row]),
    ]
    if temperature > 0:
        marks += [int(sampling.seeds[row]), int(sampling.positions[row])]
    if len(sampling.history[row]):
        penalties = (sampling.presence[row], sampling.frequency[row], sampling.repetition[row])
        marks += [sampling.history[row].tolist(), int(sampling.prompt_lens[row]), [float(p) for p in penalties]]
    digest = hashlib.blake2b(repr((state, marks)).encode(), digest_size=8).digest()
    number = int.from_bytes(digest, "little")
    token_id, wanted = number % VOCAB, int(sampling.num_logprobs[row])
    is_given = sampling.targets is not None and sampling.targets[row] >= 0
    if sampling.targets is not None and is_given:
        token_id = int(sampling.targets[row])
    if sampling.masks is not None and sampling.masks.of_row[row] >= 0:
        words = sampling.masks.words()[sampling.masks.of_row[row]]
        allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
        token_id = int(allowed[number % len(allowed)])
    logprob = float(np.float32(-(number % 1009) / 100)) if wanted >= 0 else 0.0
    top = tuple(((token_id + k) % VOCAB, float(np.float32(-k / 8 + logprob))) for k in range(max(wanted, 0)))
    return TokenLogprobs(token_id, logprob, top, 1 + number % VOCAB if is_given else 0)
