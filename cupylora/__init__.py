"""cupylora: a torch-free runtime for multi-LoRA inference on NumPy and CuPy.

Importing this package imports neither CuPy nor cuda.bindings: a device is touched only when an
operation is given device arrays or ``cupylora.device`` is asked about one.
"""

from __future__ import annotations

__all__ = ["__version__"]

__version__ = "0.1.0"
