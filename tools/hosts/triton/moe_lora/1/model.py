"""A Triton Inference Server model: the deltas of q, k and v for requests of many adapters.

    requests --> their rows side by side in the runtime's buffers --> one step --> responses

``initialize`` makes a ``LoraRuntime`` and loads every adapter of a folder. ``execute`` gets the
requests that the server has collected; each has its own adapter, and all are served by one step.
Triton's tensors are read where they are, through DLPack; the rows are then copied once, into the
step's buffers, since requests do not lie side by side. A request that cannot be served gets an
error response of its own, and the others go on.

The server's side of this file is described in ``config.pbtxt`` two folders up.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from cupylora import (
    BatchPlan,
    CupyloraError,
    DenseLora,
    LoraLimits,
    LoraRuntime,
    Workspace,
    dense_needs,
    load_model,
)
from cupylora.resources import data_dir

MODULES = ["q_proj", "k_proj", "v_proj"]
DTYPE = np.float16


class TritonPythonModel:
    """What the server makes one of per instance."""

    def initialize(self, args: dict[str, str]) -> None:
        """args["model_config"] is config.pbtxt as JSON."""
        config = json.loads(args["model_config"])
        given = {key: value["string_value"] for key, value in config["parameters"].items()}
        model, limits = (
            load_model(given["model"]),
            LoraLimits(int(given["max_loras"]), int(given["max_rank"])),
        )
        self.max_tokens = int(given["max_tokens"])
        self.runtime = LoraRuntime(
            model,
            limits,
            dtype=DTYPE,
            max_tokens=self.max_tokens,
            arena_bytes=int(given["arena_bytes"]),
            backend="cuda" if args["model_instance_kind"] == "GPU" else "numpy",
        )
        self.here = self.runtime.backend
        group = model.dense_groups[0]
        self.widths = {"x": group[0].in_features, "y": sum(m.out_features for m in group)}
        self.buffers = {
            name: self.runtime.add_buffer(name, (width,), DTYPE)
            for name, width in self.widths.items()
        }
        self._make_step(group, limits)
        folder = Path(given["adapters"]) if given["adapters"] else data_dir() / "demo"
        for adapter in sorted(path for path in folder.iterdir() if path.is_dir()):
            self.runtime.load(adapter.name, adapter)

    def _make_step(self, group: Any, limits: LoraLimits) -> None:
        sizes = {"max_tokens": self.max_tokens, "max_rank": limits.max_rank, "dtype": DTYPE}
        room = Workspace(self.here, [dense_needs(self.here, group, **sizes)])
        layer = DenseLora.of_table(self.runtime.table, 0, MODULES, room)
        plan = BatchPlan(self.here, max_tokens=self.max_tokens, max_loras=limits.max_loras)

        def step(made: Any) -> None:
            plan.update(made.token_to_slot, active=made.active)
            layer.add(made["x"], made["y"], plan)

        self.runtime.set_step(step)
        self.runtime.capture()

    def execute(self, requests: list[Any]) -> list[Any]:
        """One response a request, in their order."""
        responses: list[Any] = [None] * len(requests)
        batch: list[tuple[int, Any, str | None, int]] = []  # place, request, adapter, tokens
        rows = 0
        for place, request in enumerate(requests):
            try:
                adapter, tokens = self._look(request)
            except CupyloraError as error:
                responses[place] = _refusal(str(error))
                continue
            if rows and rows + tokens > self.max_tokens:
                self._serve(batch, responses)
                batch, rows = [], 0
            batch.append((place, request, adapter, tokens))
            rows += tokens
        if batch:
            self._serve(batch, responses)
        return responses

    def finalize(self) -> None:
        """The server unloads the model."""
        self.runtime.close()

    def _look(self, request: Any) -> tuple[str | None, int]:
        """A request's adapter and number of tokens. Raises CupyloraError for what cannot be."""
        given = pb_utils.get_input_tensor_by_name(request, "adapter").as_numpy()
        adapter = given.reshape(-1)[0].decode() or None
        self.runtime.slots_of([adapter])
        shapes = [tuple(_tensor(request, name).shape()) for name in ("x", "y")]
        tokens = shapes[0][0]
        if tokens > self.max_tokens or any(shape[0] != tokens for shape in shapes):
            raise CupyloraError(
                f"x and y have {shapes[0][0]} and {shapes[1][0]} tokens; as many in both are "
                f"needed, and at most {self.max_tokens}"
            )
        return adapter, tokens

    def _serve(self, batch: list[Any], responses: list[Any]) -> None:
        """One step for a batch that fits, and its responses."""
        try:
            with self.runtime.on_stream():
                first = 0
                for _, request, _, tokens in batch:
                    self._write(request, first, tokens)
                    first += tokens
            lengths = np.array([tokens for *_, tokens in batch], np.int32)
            self.runtime.step_names([adapter for _, _, adapter, _ in batch], lengths)
            first = 0
            for place, _, _, tokens in batch:
                responses[place] = self._response(first, tokens)
                first += tokens
        except CupyloraError as error:
            for place, *_ in batch:
                responses[place] = _refusal(str(error))

    def _write(self, request: Any, first: int, tokens: int) -> None:
        for name, buffer in self.buffers.items():
            tensor = _tensor(request, name)
            if self.here.on_device and tensor.is_cpu():
                rows = self.here.asarray(tensor.as_numpy())
            else:
                rows = self.here.view(tensor, name)
            if rows.dtype != DTYPE or rows.shape != (tokens, self.widths[name]):
                raise CupyloraError(
                    f"{name} is {rows.dtype} {rows.shape}; float16 ({tokens}, "
                    f"{self.widths[name]}) is needed"
                )
            buffer[first : first + tokens] = rows

    def _response(self, first: int, tokens: int) -> Any:
        """Its rows of y, copied: the next step writes the buffer again."""
        with self.runtime.on_stream():
            rows = self.buffers["y"][first : first + tokens].copy()
            self.here.synchronize()  # the server reads it on no stream of ours
        if self.here.on_device:
            return pb_utils.InferenceResponse([pb_utils.Tensor.from_dlpack("out", rows)])
        return pb_utils.InferenceResponse([pb_utils.Tensor("out", rows)])


def _tensor(request: Any, name: str) -> Any:
    return pb_utils.get_input_tensor_by_name(request, name)


def _refusal(message: str) -> Any:
    return pb_utils.InferenceResponse(output_tensors=[], error=pb_utils.TritonError(message))
