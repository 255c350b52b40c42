"""The operations of a LoRA step, one public function a file.

Each takes NumPy arrays (computed by its twin in ``cupylora.reference``) or device arrays (computed
by our kernels on CuPy's current stream), with the same arguments and results. ``out=`` and
``workspace=`` arguments let a caller own all memory; with them given no op allocates.

Arrays may be those of any library that has ``__dlpack__`` or ``__cuda_array_interface__``, and
:class:`~cupylora.interop.view.ArrayView` for bare addresses: they are used where they are, never
copied. The first argument says whether all are in host or in device memory. What an op allocates is
NumPy's or CuPy's; an ``out`` comes back as it was given. Work waits for what a producer's stream
has enqueued on an array; what we write is there in the order of the current stream
(``cupylora.use_stream``). A producer's memory is kept until the work given it is over; a graph
that a host captures holds addresses only, so the host keeps the arrays as long as the graph.
"""

from cupylora.ops.activation import activation
from cupylora.ops.build_problems import build_problems
from cupylora.ops.build_segments import build_segments, segments_workspace_bytes
from cupylora.ops.expert_problems import expert_problems
from cupylora.ops.fill_uniform import fill_uniform
from cupylora.ops.finalize import finalize
from cupylora.ops.grouped_gemm import grouped_gemm
from cupylora.ops.lora_activation import lora_activation
from cupylora.ops.lora_delta import LoraSlice, lora_delta, lora_workspace_bytes
from cupylora.ops.lora_finalize import lora_finalize
from cupylora.ops.permute_rows import permute_rows
from cupylora.ops.plan import plan, plan_workspace_bytes
from cupylora.ops.pointer_expand import pointer_expand
from cupylora.ops.requests_to_tokens import requests_to_tokens
from cupylora.ops.route import route, route_workspace_bytes
from cupylora.ops.slot_lookup import slot_lookup
from cupylora.ops.status import DeviceStatus
from cupylora.ops.unpack_factors import unpack_factors

__all__ = [
    "DeviceStatus",
    "LoraSlice",
    "activation",
    "build_problems",
    "build_segments",
    "expert_problems",
    "fill_uniform",
    "finalize",
    "grouped_gemm",
    "lora_activation",
    "lora_delta",
    "lora_finalize",
    "lora_workspace_bytes",
    "permute_rows",
    "plan",
    "plan_workspace_bytes",
    "pointer_expand",
    "requests_to_tokens",
    "route",
    "route_workspace_bytes",
    "segments_workspace_bytes",
    "slot_lookup",
    "unpack_factors",
]
