"""The CPU engine's backend: owns weights, KV memory and adapter tables.

It is built from a checkpoint's tensors by their Hugging Face names and moves bytes and calls `decoder.forward`. The
engine decides which rows and blocks are used; `weights` decides how weights lie in memory.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from app.engine.batch import ForwardBatch, ForwardOutput
from app.engine.config import CpuConfig, EngineConfig
from app.engine.cpu import decoder as cpu_decoder
from app.engine.cpu.adapter_backend import AdapterBackend, limits_of
from app.engine.cpu.adapter_layout import AdapterLayoutCache
from app.engine.cpu.extra_weights import AdapterExtras, sample_runs, token_slots
from app.engine.cpu.lora_memory import LoraMemory
from app.engine.cpu.lora_views import padded_width
from app.engine.cpu.mla import mla_workspace
from app.engine.cpu.moe import moe_workspace
from app.engine.cpu.outputs import one_row, rows_of, sample, sample_resized, with_sums
from app.engine.cpu.weights import PackedModules, WeightPacker, decoder_sizes, product_rows
from app.engine.cpu.weights_cache import packed_weights
from app.engine.models.linear_modules import stacked_modules
from app.engine.models.spec import ModelSpec
from app.engine.models.weight_stacks import Products, product_form
from app.kernels.machine.jit import compile_lock
from app.kernels.machine.prefault import PagePrefaulter
from app.kernels.machine.thread_team import ThreadTeam
from app.kernels.paged_attention.cpu import attention_tasks
from app.kernels.sgmv.cpu import adapter_runs, shrink_tasks

Floats = NDArray[np.float32]

#: Rows of logits for draft tokens, in addition to one for each sequence: 6 MB for a vocabulary of 49,152 tokens.
DRAFT_ROWS = 32
#: The KV cache's memory is taken as it is used, and for so many of the largest steps ahead.
STEPS_AHEAD = 4


class CpuBackend(AdapterBackend):
    """Weights in packed panels, arithmetic as `engine.cpu.compute` says; batch-invariant."""

    def __init__(
        self, spec: ModelSpec, tensors: Iterable[tuple[str, np.ndarray]], config: EngineConfig, tensors_digest: str = ""
    ) -> None:
        """`tensors` yields each weight once, e.g. ("model.layers.0.self_attn.q_proj.weight", [d_out, d_in]).
        `tensors_digest`: see `packed_weights`.

        Raises CheckpointError for a missing tensor or a spec that this decoder cannot run, ConfigError for an
        arithmetic that cannot serve these weights.
        """
        self.spec = spec
        self._config = config
        self._layouts = AdapterLayoutCache(spec)
        num_draft_rows = 0 if config.speculative_decoding == "off" else DRAFT_ROWS
        self.limits = limits_of(config, config.num_kv_blocks, self._layouts, num_draft_rows=num_draft_rows)
        self._num_phases = cpu_decoder.STEP_PHASES + cpu_decoder.LAYER_PHASES * len(spec.layers)
        self._sizes = decoder_sizes(spec)
        max_positions = min(spec.max_positions, config.max_model_len or spec.max_positions)
        cpu = config.section(CpuConfig)
        self._team = ThreadTeam(cpu.num_threads or len(os.sched_getaffinity(0)))
        self._rows = LoraMemory(spec, self.limits.lora_pool_rows, self.limits.max_loras)
        samples = config.max_num_seqs + self.limits.num_draft_rows
        products = Products(cpu.compute, product_rows(spec, config.max_num_batched_tokens, samples))
        self._weights = packed_weights(
            tensors_digest,
            (cpu.weight_dtype, products, product_form(cpu.compute), max_positions),
            lambda: WeightPacker(spec, max_positions, cpu.weight_dtype, self._team, products).pack_all(tensors),
        )
        self._k_memory, self._v_memory = self._new_kv_memory()
        # A block is in all layers: with pages of 2 MB the first token in new pages would fault 60 of them.
        layers = [layer for layer in (*self._k_memory, *self._v_memory) if layer.size]
        self._token_bytes = max(layer.nbytes for layer in layers) // (config.num_kv_blocks * config.block_size)
        self._kv_pages = PagePrefaulter(layers, STEPS_AHEAD * config.max_num_batched_tokens * self._token_bytes)
        self._work = self._new_workspace()
        base = PackedModules(spec, self._weights)
        base.log_storage()
        self._extras = AdapterExtras(spec, base, config.max_loras, self._team)
        with compile_lock(self._weights, self._sizes, self._rows.tables, self._extras.tables, self._k_memory):
            self._warm_up()

    def forward(self, batch: ForwardBatch) -> ForwardOutput:
        """See `Backend.forward`."""
        assert len(batch.token_ids) <= len(self._work.hidden), "the kernels do not check how long their arrays are"
        assert len(batch.sample_rows) <= len(self._work.logits), "the kernels do not check how long their arrays are"
        self._kv_pages.use((int(batch.kv_slots.max(initial=0)) + 1) * self._token_bytes)
        runs = adapter_runs(batch.run_starts, batch.run_adapter_slots)
        widest_rank = self._rows.widest(runs[:, 2])
        widest_of_experts = self._rows.widest_of_experts(runs[:, 2])
        extra_runs = self._extras.runs(runs)
        has_extras = len(extra_runs) > 0
        step = cpu_decoder.Step(
            token_ids=batch.token_ids, positions=batch.positions, kv_slots=batch.kv_slots,
            query_starts=batch.query_starts, seq_lens=batch.seq_lens, block_tables=batch.block_tables,
            attention_tasks=attention_tasks(batch.query_starts), runs=runs, shrink_tasks=shrink_tasks(runs),
            widest_rank=widest_rank, sample_rows=batch.sample_rows, extra_runs=extra_runs,
            extra_samples=sample_runs(extra_runs, batch.sample_rows) if has_extras else extra_runs,
            extra_slots=token_slots(extra_runs, len(batch.token_ids) if has_extras else 0),
            pooled_rows=rows_of(batch.pooling),
            adapter_slots=token_slots(runs, len(batch.token_ids) if widest_of_experts else 0),
        )  # fmt: skip
        work = self._work
        if work.moe is not None and widest_of_experts > work.moe.shrunk.shape[2]:
            shape = (len(work.moe.inputs), 2, padded_width(widest_of_experts))
            moe = work.moe._replace(shrunk=np.empty(shape, np.float32))
            self._work = work = work._replace(moe=moe)
        if work.mla is not None and widest_of_experts > work.mla.shrunk.shape[2]:
            shape = (len(work.mla.own), 1, padded_width(widest_of_experts))
            self._work = work = work._replace(mla=work.mla._replace(shrunk=np.empty(shape, np.float32)))
        if widest_rank > work.shrunk.shape[2]:
            shape = (self._config.max_num_batched_tokens, 3, padded_width(widest_rank))
            self._work = work = work._replace(shrunk=np.empty(shape, np.float32))
        if has_extras and self._extras.head_width > work.head_inputs.shape[1]:
            head_inputs = np.empty((len(work.sampled), self._extras.head_width), np.float32)
            self._work = work = work._replace(head_inputs=head_inputs)
        self._team.run(
            cpu_decoder.forward, self._num_phases, self._weights, self._sizes, self._rows.tables, self._extras.tables,
            self._k_memory, self._v_memory, step, work,
        )  # fmt: skip
        output = self._sample(batch, runs)
        return with_sums(output, work.states, batch.pooling, self._team)

    def _sample(self, batch: ForwardBatch, runs: NDArray[np.int64]) -> ForwardOutput:
        work, num_base, extras = self._work, self.spec.vocab_size, self._extras
        logits = work.logits[: len(batch.sample_rows), :num_base]
        if not extras.has_resized or (extras.vocab_sizes[runs[:, 2]] == num_base).all():
            return sample(logits, batch.sampling, self._team)
        slots = token_slots(runs, len(batch.token_ids))[batch.sample_rows]  # [P]

        def further_logits(row: int) -> Floats:
            found = extras.appended_logits(int(slots[row]), work.head_inputs[row])
            cap = self._sizes.logit_softcap
            return found if cap == 0 else cap * np.tanh(found / cap)

        return sample_resized(logits, extras.vocab_sizes[slots], further_logits, batch.sampling, self._team)

    def logits(self, num_rows: int) -> Floats:
        """The last step's logits [num_rows, vocab_size], for tests; valid until the next step."""
        return self._work.logits[:num_rows, : self.spec.vocab_size]

    def trim_memory(
        self, kept_blocks: Collection[int], kept_rows: Collection[tuple[int, int]], should_stop: Callable[[], bool], /
    ) -> bool:
        """See `Backend.trim_memory`."""
        size = self._config.block_size * self._token_bytes
        self._kv_pages.trim([(block * size, (block + 1) * size) for block in kept_blocks], should_stop)
        return super().trim_memory(kept_blocks, kept_rows, should_stop)

    def close(self) -> None:
        """End the threads and drop every array."""
        self._team.close()
        self._rows.close()
        self._kv_pages.stop()
        for name in ("_weights", "_k_memory", "_v_memory", "_rows", "_extras", "_work"):
            if hasattr(self, name):
                delattr(self, name)

    def _warm_up(self) -> None:
        """Run every kernel once, on one token: compiled here, not during the first request.

        Block 0 and, with rank rows, row 0 are written; both are written again before they are read.
        """
        one = np.zeros(1, np.int32)
        starts = np.array([0, 1], np.int32)
        self.forward(
            ForwardBatch(
                token_ids=one, positions=one, kv_slots=np.zeros(1, np.int64), query_starts=starts, seq_lens=one + 1,
                block_tables=one[None], run_starts=starts, run_adapter_slots=one, sample_rows=one, sample_seqs=one,
                sampling=one_row(),
            )
        )  # fmt: skip
        if self.limits.lora_pool_rows and self.limits.extra_weights_bytes:
            self._extras.warm_up()
        if self.limits.lora_pool_rows:
            self._rows.warm_up(self._team)

    def _new_kv_memory(self) -> tuple[NDArray[Any], NDArray[Any]]:
        first = self.spec.layers[0].attention
        in_bf16 = self._config.section(CpuConfig).kv_value_bytes == 2
        dtype: DTypeLike = np.uint16 if in_bf16 else np.float32
        if first.latent is not None:
            shape = (len(self.spec.layers), self._config.num_kv_blocks, 1, self._config.block_size)
            return np.zeros((*shape[:2], 1, 0, 0), dtype), np.zeros((*shape, padded_width(first.latent.width)), dtype)
        width, block_size = padded_width(first.head_dim), self._config.block_size
        blocks = (len(self.spec.layers), self._config.num_kv_blocks, first.num_kv_heads)
        return np.zeros((*blocks, width, block_size), dtype), np.zeros((*blocks, block_size, width), dtype)

    def _new_workspace(self) -> cpu_decoder.Workspace:
        spec, sizes = self.spec, self._sizes
        tokens = self._config.max_num_batched_tokens
        samples = self._config.max_num_seqs + self.limits.num_draft_rows
        modules = {module.name: module for module, _ in stacked_modules(spec)}
        mlp_width = modules["down"].d_in if "down" in modules else 0
        return cpu_decoder.Workspace(
            hidden=np.zeros((tokens, padded_width(spec.hidden_size)), np.float32),
            normed=np.zeros((tokens, spec.hidden_size), np.float32),
            qkv=np.zeros((tokens, sizes.q_size + 2 * sizes.kv_size), np.float32),
            attended=np.zeros((tokens, modules["o"].d_in), np.float32),
            gate_up=np.zeros((tokens, 2 * padded_width(mlp_width)), np.float32),
            gated=np.zeros((tokens, mlp_width), np.float32), shrunk=np.zeros((tokens, 3, 64), np.float32),
            saved=np.zeros((tokens, padded_width(spec.hidden_size)), np.float32),
            projected=np.zeros((tokens, padded_width(spec.hidden_size) if sizes.post_norms else 0), np.float32),
            head_inputs=np.zeros((samples, 0), np.float32), sampled=np.zeros((samples, spec.hidden_size), np.float32),
            logits=np.zeros((samples, padded_width(spec.vocab_size)), np.float32),
            states=np.zeros((tokens, spec.hidden_size), np.float32), moe=moe_workspace(spec, tokens),
            mla=mla_workspace(spec, tokens),
        )  # fmt: skip
