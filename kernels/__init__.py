"""The operations on patches that run as Triton kernels on a GPU, one op each, attention over the few kept ones,
and the update of all parameters."""

from kernels.gather import gather_patches
from kernels.overlap import patch_overlap
from kernels.sampling import sample_views
from kernels.short_attention import attention, attention_of_one
from kernels.update import unit_norms, update_parameters

__all__ = [
    "attention",
    "attention_of_one",
    "gather_patches",
    "patch_overlap",
    "sample_views",
    "unit_norms",
    "update_parameters",
]
