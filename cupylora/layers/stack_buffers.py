"""A stack's inputs as buffers that captured steps read and write.

In: ``add`` of a runtime or a StepBuffers, a model and its dtype. Out: the buffers, by the names of
StackInputs' fields with a group's number, and the StackInputs of a step over them.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from cupylora.graphs.manager import Step
from cupylora.layers.batch import StackInputs
from cupylora.shapes import ModelShape

__all__ = ["add_stack_buffers", "stack_inputs"]


def add_stack_buffers(add: Callable[..., object], model: ModelShape, dtype: npt.DTypeLike) -> None:
    """Add x, topk_ids, topk_weights, and for each dense group dense_x and dense_y with its number.

    add: as ``LoraRuntime.add_buffer``. A model without experts has routes of one choice, unused.
    """
    top_k = model.moe.top_k if model.moe else 1
    add("x", (model.hidden,), dtype)
    add("topk_ids", (top_k,), np.int32, layers=model.layers, pad=-1)
    add("topk_weights", (top_k,), np.float32, layers=model.layers)
    for number, group in enumerate(model.dense_groups):
        add(f"dense_x{number}", (group[0].in_features,), dtype)
        add(f"dense_y{number}", (sum(m.out_features for m in group),), dtype)


def stack_inputs(step: Step, model: ModelShape) -> StackInputs:
    """What ``LayerStack.step`` takes, of a step over those buffers."""
    groups, layers = range(len(model.dense_groups)), range(model.layers)
    return StackInputs(
        x=step["x"],
        dense_x=tuple(step[f"dense_x{group}"] for group in groups),
        dense_y=tuple(step[f"dense_y{group}"] for group in groups),
        token_to_slot=step.token_to_slot,
        topk_ids=tuple(step["topk_ids"][layer] for layer in layers),
        topk_weights=tuple(step["topk_weights"][layer] for layer in layers),
    )
