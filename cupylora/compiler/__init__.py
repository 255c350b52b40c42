"""From CUDA sources to launchable kernels.

``programs`` declares what there is; ``sources`` reads a program's text; ``nvrtc`` compiles it to a
cubin, with or without a GPU; ``cache`` keeps cubins by content, ``exported`` finds those that were
made elsewhere; ``loader`` puts one on the current device; ``kernel`` launches it. ``check``
compiles everything for every architecture.

What an operation uses::

    kernel = load_kernel("fill", "bfloat16")
    launch = kernel.prepare(("ptr", "u64", "u64", "f32"))
    launch(stream, grid=(64, 1, 1), block=(256, 1, 1), smem=0, args=(address, count, seed, scale))
"""

from __future__ import annotations

from cupylora.compiler.arch import ARCHITECTURES, arch_for, supports
from cupylora.compiler.kernel import Kernel, Launch
from cupylora.compiler.loader import load_kernel, prepare
from cupylora.compiler.programs import PROGRAMS, find_program
from cupylora.compiler.sources import KernelProgram, instances

__all__ = [
    "ARCHITECTURES",
    "PROGRAMS",
    "Kernel",
    "KernelProgram",
    "Launch",
    "arch_for",
    "find_program",
    "instances",
    "load_kernel",
    "prepare",
    "supports",
]
