"""The operations on patches that run as Triton kernels on a GPU, one op each, and attention over the few kept ones."""

from kernels.gather import gather_patches
from kernels.overlap import patch_overlap
from kernels.sampling import sample_views
from kernels.short_attention import attention, attention_of_one

__all__ = ["attention", "attention_of_one", "gather_patches", "patch_overlap", "sample_views"]
