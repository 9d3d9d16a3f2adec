"""Whether an adapter was trained on another model than this one, before anything else is said of it.

In: the tensors of its modules, what its configuration calls its base, and the model to serve it on. Out: nothing, or an
AdapterMismatch that has both models' names, widths and layers. Rule: only what cannot fit is refused; a name alone
proves nothing, since copies of one model have many. One module that is unlike the others is not looked at here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from app.engine.adapters.stored import StoredTensor
from app.engine.adapters.strict_json import short
from app.engine.errors import AdapterMismatch
from app.engine.models.spec import ModelSpec

_LAYER = re.compile(r"model\.layers\.(\d{1,4})\.(\w+\.\w+)")
#: Modules whose input, or output, is as wide as the model.
_READ_HIDDEN = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
_WRITE_HIDDEN = ("self_attn.o_proj", "mlp.down_proj")


def check_base(
    modules: Mapping[str, Mapping[str, StoredTensor]], spec: ModelSpec, *, trained_on: str | None, is_every_layer: bool
) -> None:
    """modules: path -> part ("lora_A", "lora_B") -> tensor. is_every_layer: whether its configuration names modules and
    leaves no layer out. Raises AdapterMismatch."""
    layers: set[int] = set()
    widths: set[int] = set()
    for path, parts in modules.items():
        match = _LAYER.fullmatch(path)
        if match is None:
            continue
        layers.add(int(match[1]))
        shapes = (parts["lora_A"].shape, parts["lora_B"].shape)
        if any(len(shape) != 2 for shape in shapes):
            continue
        if match[2] in _READ_HIDDEN:
            widths.add(shapes[0][1])
        elif match[2] in _WRITE_HIDDEN:
            widths.add(shapes[1][0])
    if not layers:
        return
    num_layers, here = 1 + max(layers), len(spec.layers)
    is_whole = layers == set(range(num_layers))  # else one module or another is wrong, and named by who looks at it
    is_another_depth = is_whole and (
        num_layers > len(spec.layers) or (is_every_layer and num_layers < len(spec.layers))
    )
    is_another_width = len(widths) == 1 and widths != {spec.hidden_size}
    if not is_another_width and not is_another_depth:
        return
    lacks = ""
    if not is_another_width and num_layers < here:
        missing = f"its file has nothing for layers {num_layers} to {here - 1}"
        lacks = f", or save it again if it was trained on this one: {missing}"
    width = " or ".join(map(str, sorted(widths))) or "unknown"
    raise AdapterMismatch(
        f"the adapter was trained on {short(trained_on) if trained_on else 'another model'} (width {width}, "
        f"{'' if is_every_layer else 'at least '}{num_layers} layers), and this base is '{spec.name}' (width "
        f"{spec.hidden_size}, {here} layers); load it where the model that it was trained on is served{lacks}"
    )
