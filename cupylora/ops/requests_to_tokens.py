"""Requests of a batch -> slot of every token; host work on both backends."""

from cupylora import reference
from cupylora.ops._device import host_op

__all__ = ["requests_to_tokens"]

requests_to_tokens = host_op(reference.requests_to_tokens)
