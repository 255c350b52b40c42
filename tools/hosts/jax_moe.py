"""A JAX host: its own jitted MoE layer, with the adapters' deltas between its two GEMMs.

    x, router's choice --> gate and up, jitted --> lora.activate_with_delta --> hidden
      (JAX arrays)              (JAX)                 (our array, JAX imports it)   |
                                                                                    v
    output <-- lora.finalize_with_delta <-------------------------------- down, jitted
    (our array, JAX imports it)                                               (JAX)

Nothing is copied in either direction: our layers read JAX's arrays where they lie, and JAX reads
ours. What to know about JAX:

- Its arrays never change. Adding a delta into one in place (``add_first``, ``add_down``) would
  change what other parts of a program were promised to be constant, so such an output is refused.
  The forms used here read the base outputs and write arrays of ours. Donating an argument to
  ``jax.jit`` does not help: it lets XLA reuse the memory, not us.
- The other way round, JAX takes an array of ours for constant. ``hidden`` may be written again in
  the next step, since by then JAX has made ``down`` from it and we have read that. ``out`` goes to
  the caller, who may keep it: each step gets a new one.
- JAX takes host memory without a copy from addresses that are multiples of 64 (``own_array``).
- On a GPU, JAX has its own stream. Each side waits for the other's through DLPack, on the device;
  the host never waits.

Run it where JAX is installed: ``python tools/hosts/jax_moe.py``; it takes the GPU if JAX does.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from ml_dtypes import bfloat16

from cupylora import (
    Arena,
    ArrayView,
    BatchPlan,
    LoraLimits,
    ModelShape,
    MoeLora,
    SlotTable,
    Workspace,
    load_adapter,
    load_model,
    moe_needs,
    open_backend,
)
from cupylora.resources import data_dir

ALIGNMENT = 64


@jax.jit
def gate_and_up(x: Any, ids: Any, weights: Any) -> Any:
    """Base outputs by (token, choice) [T*k, 2*I]: x [T, H], ids [T, k], weights [E, 2*I, H]."""
    wide = jnp.einsum("tkwh,th->tkw", weights[ids], x, preferred_element_type=jnp.float32)
    return wide.reshape(-1, weights.shape[1]).astype(x.dtype)


@jax.jit
def down(hidden: Any, ids: Any, weights: Any) -> Any:
    """Base output [T*k, H]: hidden [T*k, I], weights [E, H, I]."""
    rows = hidden.reshape(*ids.shape, -1)
    wide = jnp.einsum("tkhi,tki->tkh", weights[ids], rows, preferred_element_type=jnp.float32)
    return wide.reshape(-1, weights.shape[1]).astype(hidden.dtype)


def own_array(here: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    """An array of the backend that JAX imports without a copy."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    room = here.empty(size + ALIGNMENT, np.uint8)
    skip = -here.address(room) % ALIGNMENT
    return room[skip : skip + size].view(dtype).reshape(shape)


def to_jax(array: Any) -> Any:
    """JAX's view of an array of ours; an ArrayView, since NumPy does not export bfloat16."""
    return jax.dlpack.from_dlpack(ArrayView.of(array))


class JaxMoeLayer:
    """One MoE block of ``model``: JAX's base weights, adapters of ``table``."""

    def __init__(self, here: Any, model: ModelShape, table: SlotTable, max_tokens: int) -> None:
        moe = model.moe
        assert moe is not None
        sizes = {"max_tokens": max_tokens, "max_rank": table.limits.max_rank, "dtype": table.dtype}
        # The base outputs are JAX's arrays, so no room for them here.
        room = Workspace(here, [moe_needs(here, moe, **sizes, base=False, outputs=False)])
        self.here, self.moe = here, moe
        self.lora = MoeLora.of_table(table, 0, room)
        self.plan = BatchPlan(
            here,
            max_tokens=max_tokens,
            max_loras=table.limits.max_loras,
            experts=moe.experts,
            top_k=moe.top_k,
        )
        self._hidden = own_array(here, (max_tokens * moe.top_k, moe.intermediate), table.dtype)

    def __call__(self, x: Any, ids: Any, scores: Any, slots: Any, base: tuple[Any, Any]) -> Any:
        """[T, H] of JAX from JAX arrays: x [T, H], ids int32 and scores float32 [T, k], slots
        int32 [T] (-1: no adapter), base weights [E, 2*I, H] and [E, H, I]."""
        self.plan.update(slots, ids)
        first = gate_and_up(x, ids, base[0])
        hidden = self._hidden[: first.shape[0]]
        self.lora.activate_with_delta(x, first, self.plan, out=hidden)
        second = down(to_jax(hidden), ids, base[1])
        out = own_array(self.here, x.shape, x.dtype)
        self.lora.finalize_with_delta(hidden, second, scores, self.plan, out=out)
        return to_jax(out)


def main() -> None:
    """Four tokens, two of them with an adapter."""
    on_gpu = jax.default_backend() == "gpu"
    here = open_backend("cuda" if on_gpu else "numpy")
    model, limits = load_model("tiny-moe"), LoraLimits(max_loras=4, max_rank=16)
    table = SlotTable(model, limits, bfloat16, xp=here.xp, arena=Arena(1 << 20, here.xp))
    load_adapter(data_dir() / "demo" / "contracts-r8", table, slot=0)
    layer = JaxMoeLayer(here, model, table, max_tokens=4)
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (4, 64), jnp.bfloat16)
    base = (
        jax.random.normal(keys[1], (8, 96, 64), jnp.bfloat16) / 8,
        jax.random.normal(keys[2], (8, 64, 48), jnp.bfloat16) / 7,
    )
    ids = jnp.array([[0, 3], [1, 3], [7, 2], [5, 0]], jnp.int32)
    scores = jnp.full((4, 2), 0.5, jnp.float32)
    with_adapter = layer(x, ids, scores, jnp.array([0, -1, 0, -1], jnp.int32), base)
    without = layer(x, ids, scores, jnp.full(4, -1, jnp.int32), base)
    change = jnp.abs((with_adapter - without).astype(jnp.float32)).max(axis=1)
    print("largest change by the adapter, per token:", change)


if __name__ == "__main__":
    main()
