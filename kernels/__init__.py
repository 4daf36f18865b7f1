"""The operations on patches that run as Triton kernels on a GPU, one op each, and a ViT's layers over the kept ones."""

from kernels.gather import gather_patches
from kernels.gelu_mlp import mlp
from kernels.overlap import patch_overlap
from kernels.sampling import sample_views
from kernels.short_attention import attention

__all__ = ["attention", "gather_patches", "mlp", "patch_overlap", "sample_views"]
