"""Arrays and streams of other libraries, taken as they are: same memory, no copy, right order.

    value --> kinds: ours, or foreign? --> dlpack | cuda_interface | view --> convert: an array
              (one look at its type)       (pointer, shape, type, owner)      of ours, same memory

``convert`` is where a public call's arguments pass once. ``streams`` understands every form of a
CUDA stream and orders ours behind a producer's; ``lent`` sees to it that none is touched which its
owner may have destroyed; ``lifetimes`` keeps a producer's memory until enqueued work is over.
"""
