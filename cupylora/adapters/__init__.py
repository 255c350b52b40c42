"""Adapters: files → plan (``assembly``) → factors (``peft``) → blocks and slot table (``slots``).

Files: ``safetensors_file``, ``peft_config``; ``names`` is the table of what tensors are called, and
``stacked`` decides the layout of stacked experts. ``inspection`` shows the plan and what is wrong.
``packing`` is the layout of A in the arena; ``loading`` goes the whole way from a directory to a
slot. Nothing here needs a device: the same code fills a NumPy arena or a CuPy one.
"""
