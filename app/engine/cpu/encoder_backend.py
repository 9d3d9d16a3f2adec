"""The CPU engine's backend for encoders: owns weights and adapter tables, and has no KV memory.

Its batches hold whole texts, all to be pooled. The engine decides which rows are used.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from app.engine.batch import ForwardBatch, ForwardOutput
from app.engine.config import CpuConfig, EngineConfig, WeightDtype
from app.engine.cpu import encoder
from app.engine.cpu.adapter_backend import AdapterBackend, limits_of
from app.engine.cpu.adapter_layout import AdapterLayoutCache
from app.engine.cpu.extra_weights import AdapterExtras
from app.engine.cpu.lora_memory import LoraMemory
from app.engine.cpu.lora_views import padded_width
from app.engine.cpu.outputs import add_pooled_rows
from app.engine.cpu.weights import PackedModules
from app.engine.cpu.weights_cache import packed_weights
from app.engine.models.hf import encoder_weight_names as names
from app.engine.models.linear_modules import layer_linear_modules
from app.engine.models.spec import ModelSpec
from app.engine.models.weight_names import checked_tensors
from app.engine.models.weight_stacks import Products, StackWriter, product_form
from app.kernels.machine.thread_team import ThreadTeam
from app.kernels.matmul.cpu import PANEL
from app.kernels.sgmv.cpu import adapter_runs, shrink_tasks

Floats = NDArray[np.float32]


class EncoderBackend(AdapterBackend):
    """Weights in packed panels, arithmetic as `engine.cpu.compute` says; batch-invariant."""

    def __init__(
        self, spec: ModelSpec, tensors: Iterable[tuple[str, np.ndarray]], config: EngineConfig, tensors_digest: str = ""
    ) -> None:
        """`tensors` yields each weight once; `tensors_digest`: see `packed_weights`. Raises CheckpointError for a
        missing tensor, ConfigError for an arithmetic that cannot serve these weights."""
        assert spec.encoder is not None
        self.spec = spec
        self._first_position = spec.encoder.first_position
        self._layouts = AdapterLayoutCache(spec)
        self.limits = limits_of(config, 0, self._layouts)
        attention = spec.layers[0].attention
        self._sizes = encoder.EncoderSizes(
            num_layers=len(spec.layers),
            head_dim=attention.head_dim,
            q_size=padded_width(spec.hidden_size),
            scale=np.float32(attention.scale),
            eps=np.float32(spec.norm_eps),
        )
        self._num_phases = encoder.STEP_PHASES + encoder.LAYER_PHASES * len(spec.layers)
        cpu = config.section(CpuConfig)
        self._team = ThreadTeam(cpu.num_threads or len(os.sched_getaffinity(0)))
        modules = layer_linear_modules(spec, 0)
        products = Products(cpu.compute, {one.name: config.max_num_batched_tokens for one in modules})
        self._weights = packed_weights(
            tensors_digest,
            (cpu.weight_dtype, products, product_form(cpu.compute)),
            lambda: _pack_weights(spec, tensors, cpu.weight_dtype, self._team, products),
        )
        self._rows = LoraMemory(spec, self.limits.lora_pool_rows, self.limits.max_loras)
        base = PackedModules(spec, self._weights)
        base.log_storage()
        self._extras = AdapterExtras(spec, base, config.max_loras, self._team)
        self._work = _workspace(spec, config.max_num_batched_tokens)
        if self.limits.lora_pool_rows:
            self._extras.warm_up()
            self._rows.warm_up(self._team)

    def forward(self, batch: ForwardBatch) -> ForwardOutput:
        """See `Backend.forward`; no token is drawn."""
        assert batch.pooling is not None, "an encoder's requests are all embedded"
        assert len(batch.token_ids) <= len(self._work.hidden), "the kernels do not check how long their arrays are"
        runs = adapter_runs(batch.run_starts, batch.run_adapter_slots)
        step = encoder.EncoderStep(
            token_ids=batch.token_ids,
            position_ids=_position_ids(batch.token_ids, batch.query_starts, self._first_position),
            query_starts=batch.query_starts,
            longest=int(np.diff(batch.query_starts).max()),
            runs=runs,
            shrink_tasks=shrink_tasks(runs),
            widest_rank=self._rows.widest(runs[:, 2]),
            extra_runs=self._extras.runs(runs),
        )
        if step.widest_rank > self._work.shrunk.shape[2]:
            shape = (len(self._work.shrunk), 3, padded_width(step.widest_rank))
            self._work = self._work._replace(shrunk=np.empty(shape, np.float32))
        self._team.run(
            encoder.encode, self._num_phases, self._weights, self._sizes, self._rows.tables, self._extras.tables, step,
            self._work,
        )  # fmt: skip
        sums = add_pooled_rows(self._work.states, batch.pooling.ranges, batch.pooling.sums, self._team)
        return ForwardOutput(np.zeros(0, np.int32), np.zeros(0, np.float32), (), sums=sums)

    def close(self) -> None:
        """End the threads and drop every array."""
        self._team.close()
        self._rows.close()
        for name in ("_weights", "_rows", "_extras", "_work"):
            if hasattr(self, name):
                delattr(self, name)


def _position_ids(
    token_ids: NDArray[np.int32], query_starts: NDArray[np.int32], first_position: int
) -> NDArray[np.int32]:
    """[T] rows of the position embeddings: each text, beginning at query_starts, counts from `first_position` on.

    If that is not 0, the row before it belongs to padding, whose token has the same number, like in transformers'
    `create_position_ids_from_input_ids`: such a token in a text takes that row and no position of the text.
    """
    counts = token_ids != first_position - 1  # [T]
    positions = np.cumsum(counts)
    positions -= np.repeat((positions - counts)[query_starts[:-1]], np.diff(query_starts))  # from 1 in each text
    return (positions * counts + (first_position - 1)).astype(np.int32)


def _pack_weights(
    spec: ModelSpec, tensors: Iterable[tuple[str, np.ndarray]], weight_dtype: WeightDtype, team: ThreadTeam,
    products: Products,
) -> encoder.EncoderWeights:  # fmt: skip
    """Put every tensor in its place; CheckpointError for one that has none or is missing."""
    count, hidden = len(spec.layers), spec.hidden_size
    norms = {names.ATTENTION_NORM: np.zeros((count, 2, hidden), np.float32)}
    norms[names.MLP_NORM] = np.zeros((count, 2, hidden), np.float32)
    input_norm = np.zeros((2, hidden), np.float32)
    whole: dict[str, Floats] = {}
    biases, columns = {}, {}
    stacks: dict[str, StackWriter] = {}
    for module in layer_linear_modules(spec, 0):
        width = module.width(PANEL)
        stacks[module.name] = products.writer(module.name, (count, width, module.d_in), weight_dtype, team)
        biases[f"{module.name}_bias"] = np.zeros((count, width), np.float32)
        for target, start in zip(module.targets, module.starts(PANEL), strict=True):
            columns[module.kind.path(target)] = module.name, start
    for name, stored in checked_tensors(spec, tensors):
        tensor = np.asarray(stored).astype(np.float32, copy=False)
        module_name, part = name.rsplit(".", 1)
        if module_name == names.INPUT_NORM:
            input_norm[int(part == "bias")] = tensor
        elif name in (names.WORD_EMBEDDINGS, names.POSITION_EMBEDDINGS, names.TOKEN_TYPE_EMBEDDINGS):
            whole[name] = np.ascontiguousarray(tensor)
        else:
            layer, path = module_name.removeprefix(f"{names.LAYERS}.").split(".", 1)
            if path in norms:
                norms[path][int(layer), int(part == "bias")] = tensor
                continue
            stack_name, column = columns[path]
            if part == "bias":
                biases[f"{stack_name}_bias"][int(layer), column : column + len(tensor)] = tensor
            else:
                stacks[stack_name].store(int(layer), column, tensor)
    packed: dict[str, Any] = dict(products.stacks(spec.name, stacks))
    return encoder.EncoderWeights(
        word_embeddings=whole[names.WORD_EMBEDDINGS], position_embeddings=whole[names.POSITION_EMBEDDINGS],
        token_type_embedding=whole[names.TOKEN_TYPE_EMBEDDINGS][0].copy(), input_norm=input_norm,
        attention_norm=norms[names.ATTENTION_NORM], mlp_norm=norms[names.MLP_NORM], **packed, **biases,
    )  # fmt: skip


def _workspace(spec: ModelSpec, num_tokens: int) -> encoder.EncoderWorkspace:
    hidden, wide = spec.hidden_size, spec.layers[0].mlp.intermediate_size

    def rows(*shape: int) -> Floats:
        return np.zeros((num_tokens, *shape), np.float32)

    return encoder.EncoderWorkspace(
        hidden=rows(padded_width(hidden)), states=rows(hidden), qkv=rows(3 * padded_width(hidden)),
        attended=rows(hidden), up=rows(padded_width(wide)), activated=rows(wide), shrunk=rows(3, 64),
        saved=rows(padded_width(hidden)),
    )  # fmt: skip
