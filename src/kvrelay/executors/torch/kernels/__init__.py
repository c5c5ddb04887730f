"""The elementwise and linear pieces of a decoder layer: torch anywhere, Numba on the CPU.

``base`` is the contract, ``torch_kernels`` and ``numba_kernels`` implement it; ``numba_math`` is shared with the CPU's
attention.
"""
