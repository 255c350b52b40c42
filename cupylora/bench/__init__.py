"""What ``cupylora bench`` measures: CUDA-graph times of the LoRA kernels, with floors beside them.

``points`` says what is measured, ``draws`` and ``floors`` what a batch holds and must move;
``pools``, ``workloads`` and ``check`` put it on a backend and judge the outputs; ``timing`` and
``stream`` are the CUDA graphs and the read kernel; ``measure`` turns a point into a measurement and
``session`` a list of points into ``record`` rows, which ``table``, ``plot`` and ``compare`` read.
``peers`` runs other projects' kernels on the same points. Nothing here imports CuPy before a device
is measured, so that saved results can be read anywhere.
"""
