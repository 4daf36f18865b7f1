"""The operations on patches that run as Triton kernels on a GPU, one op each, attention over the few kept ones,
the update of all parameters, and the choice among a library's products."""

from importlib import import_module

_HOMES = {
    "add_norm": "residual_norm", "attention": "short_attention", "attention_of_one": "short_attention",
    "class_attention": "class_token", "gather_patches": "gather", "patch_overlap": "overlap",
    "sample_views": "sampling", "unit_norms": "update", "update_parameters": "update",
}  # fmt: skip
__all__ = list(_HOMES)


def __getattr__(name):  # imported where it is used: a command line, which needs philox, is answered without torch
    if name not in _HOMES:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
