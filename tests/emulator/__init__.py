"""An emulator of the CUDA kernels for machines without a GPU: it runs them and looks for faults.

``device.Device`` stands in for a GPU: the ops of ``cupylora.ops`` called with its arrays run the
kernels of ``cuda_src``, which g++ compiles (``build``, from text that ``rewrite`` has prepared)
against a model of the machine, the C++ files here. Threads run in a random order that a seed
decides, and the model fails a launch that

- touches memory outside its arrays, or memory of the kernel ahead before waiting for it;
- reads shared memory that nothing has written, but where the program is known to drop it;
- has two accesses to shared memory that nothing orders, or an element of global memory written by
  one thread and touched by another in no order;
- lets the asynchronous proxy overwrite generic writes without a fence;
- counts an mbarrier's arrivals or bytes wrongly, uses one that is not initialised, or leaves a CTA
  while bytes are on the way to it;
- diverges within a warp's collective, misaligns an access, or comes to a standstill.
"""
