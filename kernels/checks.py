"""Argument checks shared by the public functions: one clear line for the caller, never a look at values on a device."""

import math

import torch
import triton

from kernels.reference import MAX_PATCHES

# Fixed when the kernels are defined: with TRITON_INTERPRET=1 they run in the interpreter, and CPU tensors with them.
INTERPRET = triton.knobs.runtime.interpret


def check_tensor(name, x, dtype, shape, device=None):
    """``shape``: the expected sizes, None where any size will do."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name}: expected a {dtype} tensor, got {type(x).__name__}")
    if x.dtype != dtype:
        raise TypeError(f"{name}: expected dtype {dtype}, got {x.dtype}")
    if x.dim() != len(shape) or any(want not in (None, size) for size, want in zip(x.shape, shape, strict=True)):
        wanted = ", ".join("any" if want is None else str(want) for want in shape)
        raise ValueError(f"{name}: expected shape [{wanted}], got {list(x.shape)}")
    if device is not None and x.device != device:
        raise ValueError(f"{name}: expected on {device} like the first argument, got {x.device}")


def check_boxes_and_grid(boxes, flips, grid):
    check_tensor("boxes", boxes, torch.int32, (None, 2, 4))
    check_tensor("flips", flips, torch.bool, (boxes.shape[0], 2), boxes.device)
    if len(grid) != 2 or min(grid) < 1 or math.prod(grid) > MAX_PATCHES:
        raise ValueError(f"grid: expected (rows, columns) with 1 to {MAX_PATCHES} patches, got {grid}")
