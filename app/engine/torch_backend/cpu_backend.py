"""The CPU form of the torch engine's backend: packs weights, owns KV memory and adapter tables.

In: a checkpoint's tensors, by their Hugging Face names, and the engine's sizes. Out: a `Backend`. It
moves bytes and calls `cpu_decoder.forward`; which rows and blocks are used is decided elsewhere.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from app.engine.adapters.lora import TARGETS, LoraAdapter, LoraKey
from app.engine.backend import BackendLimits
from app.engine.batch import ForwardBatch, ForwardOutput, SamplingBatch
from app.engine.config import EngineConfig
from app.engine.cpu_extras import AdapterExtras, sample_runs, token_slots
from app.engine.errors import AdapterMismatch, CheckpointError
from app.engine.models.spec import ModelSpec, RopeSpec
from app.engine.torch_backend import cpu_decoder
from app.engine.torch_backend.sampling import sample
from app.kernels.matmul._cpu import PANEL
from app.kernels.matmul._quantised import Quantised, Stack, dequantise, empty_stack, store
from app.kernels.paged_attention._cpu import attention_tasks
from app.kernels.sgmv._cpu import RANK_PANEL, adapter_runs, shrink_tasks
from app.kernels.sgmv._writing import WritePlans, write_plan
from app.kernels.team import Team

Floats = NDArray[np.float32]


class CpuBackend:
    """Weights in packed panels, float32 arithmetic; every row's bits independent of its company."""

    def __init__(self, spec: ModelSpec, tensors: Iterable[tuple[str, np.ndarray]], config: EngineConfig) -> None:
        """`tensors` yields each weight once, e.g. ("model.layers.0.self_attn.q_proj.weight", [d_out, d_in]).

        Raises CheckpointError for a missing tensor or a spec this decoder cannot run.
        """
        self._spec = spec
        self._config = config
        self._limits = BackendLimits(
            num_kv_blocks=config.num_kv_blocks,
            block_size=config.block_size,
            adapter_rank_rows=config.adapter_rank_rows // RANK_PANEL * RANK_PANEL,
            rank_alignment=RANK_PANEL,
            max_adapter_slots=config.max_adapter_slots,
            adapter_extra_bytes=config.adapter_extra_bytes,
        )
        self._num_phases = cpu_decoder.STEP_PHASES + cpu_decoder.LAYER_PHASES * len(spec.layers)
        self._sizes = _sizes(spec)
        max_positions = min(spec.max_positions, config.max_context or spec.max_positions)
        quantised = config.weight_storage == "int8"
        # The pages of the tables are touched while weights are unpacked: seconds, where memory is new to the machine.
        with ThreadPoolExecutor(1) as aside:
            tables = aside.submit(self._new_tables)
            self._weights = _WeightPacker(spec, self._sizes, max_positions, quantised=quantised).pack_all(tensors)
        self._tables = tables.result()
        rows: tuple[Any, ...] = self._tables[: 2 * len(TARGETS)]
        self._plans = WritePlans(rows[: len(TARGETS)], rows[len(TARGETS) :])
        first = spec.layers[0].attention
        num_layers, width = len(spec.layers), _padded(first.head_dim)
        blocks = (num_layers, config.num_kv_blocks, first.num_kv_heads)
        self._k_memory = np.zeros((*blocks, width, config.block_size), np.float32)
        self._v_memory = np.zeros((*blocks, config.block_size, width), np.float32)
        self._work = self._new_workspace()
        self._team = Team(config.num_threads or len(os.sched_getaffinity(0)))
        base = _PackedModules(spec, self._weights, self._sizes)
        self._extras = AdapterExtras(spec, base, config.max_adapter_slots, self._team)
        self._warm_up()

    @property
    def spec(self) -> ModelSpec:
        return self._spec

    @property
    def limits(self) -> BackendLimits:
        return self._limits

    def write_adapter(self, adapter_slot: int, row_start: int, adapter: LoraAdapter) -> None:
        """See `Backend.write_adapter`. Raises AdapterMismatch for a module this decoder does not have."""
        ranks = np.zeros((len(self._spec.layers), len(TARGETS)), np.int32)
        modules: list[tuple[int, int, Floats, Floats]] = []
        for key, pair in adapter.weights.items():
            if key.target not in TARGETS or key.expert is not None or key.layer >= len(self._spec.layers):
                raise AdapterMismatch(
                    f"this engine has no module {key.target!r} (expert {key.expert}) in layer {key.layer}"
                )
            n = TARGETS.index(key.target)
            modules.append((key.layer, n, np.ascontiguousarray(pair.a), np.ascontiguousarray(pair.b)))
            ranks[key.layer, n] = pair.rank
        self._team.run(write_plan, 1, self._plans.plan(modules, row_start))
        self._extras.write(adapter_slot, adapter)
        self._tables.ranks[:, adapter_slot] = ranks
        self._tables.row_starts[adapter_slot] = row_start

    def is_ready(self, adapter_slot: int) -> bool:  # noqa: ARG002
        """See `Backend.is_ready`: a write has ended when it returns."""
        return True

    def release_adapter(self, adapter_slot: int) -> None:
        """See `Backend.release_adapter`."""
        self._extras.release(adapter_slot)

    def forward(self, batch: ForwardBatch) -> ForwardOutput:
        """See `Backend.forward`."""
        runs = adapter_runs(batch.run_starts, batch.run_adapter_slots)
        widest_rank = int(self._tables.ranks[:, runs[:, 2]].max(initial=0))
        extra_runs = self._extras.runs(runs)
        has_extras = len(extra_runs) > 0
        step = cpu_decoder.Step(
            token_ids=batch.token_ids,
            positions=batch.positions,
            kv_slots=batch.kv_slots,
            query_starts=batch.query_starts,
            seq_lens=batch.seq_lens,
            block_tables=batch.block_tables,
            attention_tasks=attention_tasks(batch.query_starts),
            runs=runs,
            shrink_tasks=shrink_tasks(runs),
            widest_rank=widest_rank,
            sample_rows=batch.sample_rows,
            extra_runs=extra_runs,
            extra_samples=sample_runs(extra_runs, batch.sample_rows) if has_extras else extra_runs,
            extra_slots=token_slots(extra_runs, len(batch.token_ids) if has_extras else 0),
        )
        work = self._work
        if widest_rank > work.shrunk.shape[2]:
            shape = (self._config.max_batch_tokens, 3, _padded(widest_rank))
            self._work = work = work._replace(shrunk=np.empty(shape, np.float32))
        if has_extras and self._extras.head_width > work.head_inputs.shape[1]:
            head_inputs = np.empty((self._config.max_batch_sequences, self._extras.head_width), np.float32)
            self._work = work = work._replace(head_inputs=head_inputs)
        self._team.run(
            cpu_decoder.forward, self._num_phases, self._weights, self._sizes, self._tables, self._extras.tables,
            self._k_memory, self._v_memory, step, work,
        )  # fmt: skip
        return sample(work.logits[: len(batch.sample_rows), : self._spec.vocab_size], batch.sampling, self._team)

    def logits(self, num_rows: int) -> Floats:
        """The last step's logits [num_rows, vocab_size]; valid until the next step (tests read it)."""
        return self._work.logits[:num_rows, : self._spec.vocab_size]

    def close(self) -> None:
        """End the threads and drop every array."""
        self._team.close()
        for name in ("_weights", "_k_memory", "_v_memory", "_plans", "_tables", "_extras", "_work"):
            if hasattr(self, name):
                delattr(self, name)

    def _warm_up(self) -> None:
        """Run every kernel once, on one token of no consequence: compiled here, not under the first request.

        Block 0 and, if there are rank rows, row 0 are written; nobody reads either before writing it anew.
        """
        one = np.zeros(1, np.int32)
        single = np.ones(1, np.float32)
        sampling = SamplingBatch(
            temperature=single, top_p=single, top_k=one, min_p=0 * single, presence=single, frequency=single,
            repetition=single, seeds=np.zeros(1, np.uint64), positions=np.zeros(1, np.int64), num_logprobs=one,
            history=(one,), prompt_lens=one,
        )  # fmt: skip
        starts = np.array([0, 1], np.int32)
        self.forward(
            ForwardBatch(
                token_ids=one,
                positions=one,
                kv_slots=np.zeros(1, np.int64),
                query_starts=starts,
                seq_lens=one + 1,
                block_tables=one[None],
                run_starts=starts,
                run_adapter_slots=one,
                sample_rows=one,
                sample_seqs=one,
                sampling=sampling,
            )
        )
        if self._limits.adapter_rank_rows and self._limits.adapter_extra_bytes:
            self._extras.warm_up()
        if self._limits.adapter_rank_rows:
            d_in, d_out = self._spec.target_shape(0, TARGETS[0])
            nothing = (0, 0, np.zeros((1, d_in), np.float32), np.zeros((1, d_out), np.float32))
            self._team.run(write_plan, 1, self._plans.plan([nothing], 0))

    def _new_tables(self) -> cpu_decoder.AdapterTables:
        num_layers, rows = len(self._spec.layers), self._limits.adapter_rank_rows
        shapes = [self._spec.target_shape(0, target) for target in TARGETS]
        # full(), not zeros(): the pages are touched now, not by the first adapters while streams wait.
        a = [np.full((num_layers, rows // RANK_PANEL, d_in, RANK_PANEL), 0, np.float32) for d_in, _ in shapes]
        b = [np.full((num_layers, -(-d_out // PANEL), rows, PANEL), 0, np.float32) for _, d_out in shapes]
        row_starts = np.zeros(self._limits.max_adapter_slots, np.int64)
        ranks = np.zeros((num_layers, self._limits.max_adapter_slots, len(TARGETS)), np.int32)
        return cpu_decoder.AdapterTables._make([*a, *b, row_starts, ranks])

    def _new_workspace(self) -> cpu_decoder.Workspace:
        spec, sizes = self._spec, self._sizes
        tokens, sequences = self._config.max_batch_tokens, self._config.max_batch_sequences
        mlp_width = spec.layers[0].mlp.intermediate_size
        return cpu_decoder.Workspace(
            hidden=np.zeros((tokens, _padded(spec.hidden_size)), np.float32),
            normed=np.zeros((tokens, spec.hidden_size), np.float32),
            qkv=np.zeros((tokens, sizes.q_size + 2 * sizes.kv_size), np.float32),
            attended=np.zeros((tokens, sizes.num_heads * sizes.head_dim), np.float32),
            gate_up=np.zeros((tokens, 2 * sizes.mlp_size), np.float32),
            gated=np.zeros((tokens, mlp_width), np.float32),
            shrunk=np.zeros((tokens, 3, 64), np.float32),
            kept=np.zeros((tokens, _padded(spec.hidden_size)), np.float32),
            head_inputs=np.zeros((sequences, 0), np.float32),
            sampled=np.zeros((sequences, spec.hidden_size), np.float32),
            logits=np.zeros((sequences, _padded(spec.vocab_size)), np.float32),
        )


def _padded(size: int) -> int:
    """The next multiple of a panel's width."""
    return -(-size // PANEL) * PANEL


def _sizes(spec: ModelSpec) -> cpu_decoder.Sizes:
    first = spec.layers[0]
    for index, layer in enumerate(spec.layers):
        same = (layer.attention.num_heads, layer.attention.num_kv_heads, layer.attention.head_dim, layer.mlp)
        if same != (first.attention.num_heads, first.attention.num_kv_heads, first.attention.head_dim, first.mlp):
            raise CheckpointError(
                f"layer {index} of {spec.name} differs in size from layer 0: not supported on the CPU"
            )
    attention = first.attention
    return cpu_decoder.Sizes(
        num_heads=attention.num_heads,
        num_kv_heads=attention.num_kv_heads,
        head_dim=attention.head_dim,
        q_size=_padded(attention.num_heads * attention.head_dim),
        kv_size=_padded(attention.num_kv_heads * attention.head_dim),
        mlp_size=_padded(first.mlp.intermediate_size),
        gelu=first.mlp.activation == "gelu_tanh",
        eps=np.float32(spec.norm_eps),
    )


def _module_columns(sizes: cpu_decoder.Sizes) -> dict[str, tuple[str, int]]:
    """Linear module of a layer -> (field of `Weights`, first column in it)."""
    return {
        "self_attn.q_proj": ("qkv", 0),
        "self_attn.k_proj": ("qkv", sizes.q_size),
        "self_attn.v_proj": ("qkv", sizes.q_size + sizes.kv_size),
        "self_attn.o_proj": ("out", 0),
        "mlp.gate_proj": ("gate_up", 0),
        "mlp.up_proj": ("gate_up", sizes.mlp_size),
        "mlp.down_proj": ("down", 0),
    }


class _PackedModules:
    """The base's modules for `AdapterExtras`."""

    def __init__(self, spec: ModelSpec, weights: cpu_decoder.Weights, sizes: cpu_decoder.Sizes) -> None:
        self._spec, self._weights = spec, weights
        self._columns = {module.rpartition(".")[2]: place for module, place in _module_columns(sizes).items()}

    def panels(self, key: LoraKey) -> Floats:
        name, column = self._columns[key.target]
        stack: Stack = getattr(self._weights, name)
        columns = slice(column // PANEL, (column + _padded(self._spec.target_shape(key.layer, key.target)[1])) // PANEL)
        if isinstance(stack, Quantised):
            return dequantise(Quantised._make(part[key.layer, columns] for part in stack))
        return stack[key.layer, columns]

    def bias(self, key: LoraKey) -> Floats | None:
        name, column = self._columns[key.target]
        biases: Floats = getattr(self._weights, f"{name}_bias")
        d_out = self._spec.target_shape(key.layer, key.target)[1]
        return biases[key.layer, column : column + d_out] if biases.shape[1] else None


class _WeightPacker:
    """Fills the stacked arrays tensor by tensor, so that at most one unpacked tensor is in memory."""

    def __init__(self, spec: ModelSpec, sizes: cpu_decoder.Sizes, max_positions: int, *, quantised: bool) -> None:
        self._spec, self._sizes = spec, sizes
        count, hidden = len(spec.layers), spec.hidden_size
        attention, mlp = spec.layers[0].attention, spec.layers[0].mlp
        qkv_width, q_width = sizes.q_size + 2 * sizes.kv_size, attention.num_heads * attention.head_dim
        any_layer = [layer.attention for layer in spec.layers]
        norm_width = attention.head_dim if attention.qk_norm else 0
        ropes = list(dict.fromkeys(a.rope for a in any_layer))
        cos, sin = _rope_tables(ropes, max_positions)

        def zeros(*shape: int) -> Floats:
            return np.zeros(shape, np.float32)

        self._arrays: dict[str, Floats] = {
            "embedding": zeros(0 if spec.tie_embeddings else spec.vocab_size, hidden),
            "final_norm": zeros(hidden),
            "attention_norm": zeros(count, hidden),
            "mlp_norm": zeros(count, hidden),
            "qkv_bias": zeros(count, qkv_width if attention.qkv_bias else 0),
            "q_norm": zeros(count, norm_width),
            "k_norm": zeros(count, norm_width),
            "out_bias": zeros(count, hidden if attention.o_bias else 0),
            "gate_up_bias": zeros(count, 2 * sizes.mlp_size if mlp.bias else 0),
            "down_bias": zeros(count, hidden if mlp.bias else 0),
        }
        self._stacks: dict[str, Stack] = {
            "head": empty_stack(1, spec.vocab_size, hidden, quantised=quantised),
            "qkv": empty_stack(count, qkv_width, hidden, quantised=quantised),
            "out": empty_stack(count, hidden, q_width, quantised=quantised),
            "gate_up": empty_stack(count, 2 * sizes.mlp_size, hidden, quantised=quantised),
            "down": empty_stack(count, hidden, mlp.intermediate_size, quantised=quantised),
        }
        self._constants: dict[str, NDArray[Any]] = {
            "cos": cos,
            "sin": sin,
            "layer_rope": np.array([ropes.index(a.rope) for a in any_layer], np.int64),
            "layer_window": np.array([a.window or 0 for a in any_layer], np.int64),
            "scales": np.array([a.scale for a in any_layer], np.float32),
        }
        self._columns = _module_columns(sizes)
        self._vectors = {
            "input_layernorm": "attention_norm",
            "post_attention_layernorm": "mlp_norm",
            "self_attn.q_norm": "q_norm",
            "self_attn.k_norm": "k_norm",
        }

    def pack_all(self, tensors: Iterable[tuple[str, np.ndarray]]) -> cpu_decoder.Weights:
        """Consume every tensor; CheckpointError for one that has no place or is missing."""
        expected = self._expected()
        for name, tensor in tensors:
            if name not in expected:
                raise CheckpointError(f"tensor {name!r} has no place in {self._spec.name}")
            expected.discard(name)
            self._place(name, np.asarray(tensor).astype(np.float32, copy=False))
        if expected:
            raise CheckpointError(f"{self._spec.name} lacks {len(expected)} tensors, the first: {min(expected)!r}")
        return cpu_decoder.Weights(**self._arrays, **self._stacks, **self._constants)  # type: ignore[arg-type]

    def _expected(self) -> set[str]:
        attention, mlp = self._spec.layers[0].attention, self._spec.layers[0].mlp
        names = {"model.embed_tokens.weight", "model.norm.weight"}
        if not self._spec.tie_embeddings:
            names.add("lm_head.weight")
        for layer in range(len(self._spec.layers)):
            prefix = f"model.layers.{layer}."
            for module in self._columns:
                names.add(f"{prefix}{module}.weight")
                is_qkv = module.startswith("self_attn") and not module.endswith("o_proj")
                if attention.qkv_bias if is_qkv else attention.o_bias if "self_attn" in module else mlp.bias:
                    names.add(f"{prefix}{module}.bias")
            for module in self._vectors:
                if attention.qk_norm or "self_attn" not in module:
                    names.add(f"{prefix}{module}.weight")
        return names

    def _place(self, name: str, tensor: Floats) -> None:
        if name == "model.embed_tokens.weight":
            if self._spec.tie_embeddings:
                store(self._stacks["head"], 0, 0, tensor)
            else:
                self._arrays["embedding"][:] = tensor
        elif name == "lm_head.weight":
            store(self._stacks["head"], 0, 0, tensor)
        elif name == "model.norm.weight":
            self._arrays["final_norm"][:] = tensor
        else:
            _, _, layer_text, rest = name.split(".", 3)
            module, kind = rest.rsplit(".", 1)
            layer = int(layer_text)
            if module in self._vectors:
                self._arrays[self._vectors[module]][layer] = tensor
            elif kind == "bias":
                array, column = self._columns[module]
                self._arrays[f"{array}_bias"][layer, column : column + len(tensor)] = tensor
            else:
                array, column = self._columns[module]
                store(self._stacks[array], layer, column, tensor)


def _rope_tables(ropes: list[RopeSpec], max_positions: int) -> tuple[Floats, Floats]:
    """cos and sin [ropes, positions, rotary / 2], angles in float32 as transformers computes them."""
    positions = np.arange(max_positions, dtype=np.float32)
    tables = []
    for rope in ropes:
        angles = positions[:, None] * np.array(rope.inv_freq, np.float32)[None]
        tables.append(
            (np.cos(angles) * np.float32(rope.attention_factor), np.sin(angles) * np.float32(rope.attention_factor))
        )
    return np.stack([c for c, _ in tables]), np.stack([s for _, s in tables])
