"""`triton_kernel_set`: every op in Triton-language."""

from dataclasses import replace

from kimi_kernels.kernel_set import KernelSet
from kimi_kernels.mla_decode.kernel import mla_decode, plan_mla_decode
from kimi_kernels.reference import reference_kernel_set


def triton_kernel_set() -> KernelSet:
    """Kernels for a CUDA device; ops that have none yet are the reference's (all but the two of `mla_decode`)."""
    return replace(
        reference_kernel_set(),
        name="triton",
        row_invariant=False,
        absorb_prefill=False,
        plan_mla_decode=plan_mla_decode,
        mla_decode=mla_decode,
    )
