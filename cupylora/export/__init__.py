"""Kernels for stacks that compile nothing: cubins, a manifest and a C header.

``declarations`` and ``cubin`` read what kernels take, from the sources and from what was compiled;
``rules`` and ``meanings`` say how they are launched and what arguments are; ``choice`` collects the
numbers by which ops choose. ``manifest`` and ``table`` write that down as JSON and as C; ``folder``
puts an export in place. ``compiler.exported`` is the way back into Python.
"""
