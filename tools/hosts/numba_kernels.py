"""A numba-cuda host: its kernels before and after an adapter's delta, all on its own stream.

    x and base outputs y (numba kernels) --> y += delta (``cupy_alone``) --> your kernels

numba's device arrays are given as they are: through their CUDA array interface we see address,
shape and the stream that they belong to. ``use_stream`` puts our work on that stream, in line with
numba's, so that nobody waits for anybody. Without it our stream would wait for arrays that name
theirs (``device_array(..., stream=stream)``); an array that names none is taken as it is, and the
order is yours to see to. numba has no bfloat16, so this is float16.

CUDA only, where numba-cuda is installed beside CuPy: ``python tools/hosts/numba_kernels.py``.
Python would take a file named ``numba_cuda.py`` for the package by which numba finds CUDA.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from cupy_alone import add_deltas

from cupylora import open_backend, use_stream

try:
    from numba import cuda
except ImportError as error:
    raise ImportError(
        "this host needs numba-cuda beside CuPy: pip install 'numba-cuda[cu13]' (or [cu12])"
    ) from error
except Exception as error:  # whatever numba-cuda meets in a NumPy newer than itself
    raise ImportError(
        f"numba-cuda is installed, but cannot be imported beside NumPy {np.__version__} "
        f"({type(error).__name__}: {error}); install versions of the two that fit"
    ) from error

TOKENS, WIDTH_IN, WIDTH_OUT = 4, 64, 128


@cuda.jit
def fill(array: Any, value: Any) -> None:
    """Every element of a 2-D array becomes ``value``: stands for the kernels of your model."""
    i, j = cuda.grid(2)
    if i < array.shape[0] and j < array.shape[1]:
        array[i, j] = value


def step(stream: Any) -> Any:
    """y [4, 128] of numba with the deltas of x [4, 64] added, enqueued on ``stream``."""
    x, y = (
        cuda.device_array((TOKENS, width), np.float16, stream=stream)
        for width in (WIDTH_IN, WIDTH_OUT)
    )
    fill[(1, 4), (TOKENS, 32), stream](x, np.float16(1))
    fill[(1, 4), (TOKENS, 32), stream](y, np.float16(0))
    with use_stream(stream):
        add_deltas(open_backend("cuda"), x, y)
    return y


def main() -> None:
    """Show that tokens of no adapter keep their values."""
    if not cuda.is_available():
        raise SystemExit("numba finds no CUDA device, or no NVVM to compile with: see numba -s")
    stream = cuda.stream()
    print(step(stream).copy_to_host(stream=stream)[:, :4])


if __name__ == "__main__":
    main()
