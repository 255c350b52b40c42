"""Layers of a model with LoRA on them, over the ops.

``plan`` keeps a batch's work lists, ``workspace`` the memory that all layers share; ``dense`` and
``moe`` are the two kinds of layer, each usable on a host's own base outputs; ``stack`` chains them
as a model does, on inputs from ``batch``. All are written once for NumPy and CUDA, and allocate
nothing once constructed.
"""
