"""The NumPy twin of every op: same name, same arguments, one public function a file.

It is both the oracle that the kernels are compared with and the CPU backend. Weights are read at
host addresses, sums are float32, every output is rounded once. ``oracle`` alone is apart: it
computes in float64 straight from factor matrices, without any work list.
"""

from cupylora.reference.activation import activation
from cupylora.reference.build_problems import build_problems
from cupylora.reference.build_segments import build_segments
from cupylora.reference.expert_problems import expert_problems
from cupylora.reference.fill_uniform import fill_uniform
from cupylora.reference.finalize import finalize
from cupylora.reference.grouped_gemm import grouped_gemm
from cupylora.reference.lora_activation import lora_activation
from cupylora.reference.lora_delta import lora_delta
from cupylora.reference.lora_finalize import lora_finalize
from cupylora.reference.permute_rows import permute_rows
from cupylora.reference.plan import plan
from cupylora.reference.pointer_expand import pointer_expand
from cupylora.reference.requests_to_tokens import requests_to_tokens
from cupylora.reference.route import route
from cupylora.reference.slot_lookup import slot_lookup
from cupylora.reference.unpack_factors import unpack_factors

__all__ = [
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
    "permute_rows",
    "plan",
    "pointer_expand",
    "requests_to_tokens",
    "route",
    "slot_lookup",
    "unpack_factors",
]
