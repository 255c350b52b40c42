"""Adapters: files → checked factors (``peft``) → packed blocks and slot table (``slots``).

``packing`` is the layout of A in the arena; ``loading`` goes the whole way from a directory to a
slot. Nothing here needs a device: the same code fills a NumPy arena or a CuPy one.
"""
