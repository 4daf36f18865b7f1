"""Patch sampling on the GPU, one op each: draw the patches of both views, measure their overlap, gather pixels."""

from kernels.gather import gather_patches
from kernels.overlap import patch_overlap
from kernels.sampling import sample_views

__all__ = ["gather_patches", "patch_overlap", "sample_views"]
