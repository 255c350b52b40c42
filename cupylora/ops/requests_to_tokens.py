"""Requests of a batch -> slot of every token; host work on both backends."""

from cupylora.reference.requests_to_tokens import requests_to_tokens

__all__ = ["requests_to_tokens"]
