"""Operations of the CUDA engine in plain torch, one file per operation, for tests on machines without a GPU.

Signatures are those of `app/kernels/<operation>/triton.py`. In deterministic mode sums have one order (`fixed_order`).
"""
