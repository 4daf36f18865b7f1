"""What the kernels compile to for GPUs of NVIDIA and AMD."""

import pytest

from bench import compile
from kernels.compiled import compile_for


@pytest.fixture(scope="module")
def made():
    """By compute capability what ``compile_for`` gives. The matrix units of 12.0 are those of 8.0."""
    return {capability: list(compile_for(capability)) for capability in (80, 90, 100)}


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_compiled_for_the_large_recipes(made, capability):
    """ViT-S/16 at 224 pixels; and in the PTX of the gather what its docstring says."""
    made = {name: kernel.asm for name, kernel in made[capability]}
    for name in ("attention", "attention_backward"):  # 49 kept patches and the class token; rows of 6 heads of 64
        assert all(f"dense<{number}>" in made[name]["ttir"] for number in (50, 6 * 64, 3 * 6 * 64)), name
    ptx = made["gather_patches"]["ptx"]
    assert "fma" not in ptx  # a subtraction and a multiplication, each rounded: so every device has the same result
    assert "ld.global.b64" in ptx and "st.global.v4.b32" in ptx  # whole words in, 16 bytes a channel out
    assert all(f"dense<{number}>" in made["gather_patches"]["ttir"] for number in (49, 14 * 14, 14 * 16))


def test_compiled_kernels(made, monkeypatch):
    """In the machine code for each kind of NVIDIA's matrix units, and for AMD."""
    monkeypatch.setattr(compile, "CAPABILITIES", tuple(made))
    monkeypatch.setattr(compile, "compile_for", made.get)
    rows = list(compile.compiled_rows())
    targets = {row["target"] for row in rows}
    assert len(rows) == 52 and targets == {"sm_80", "sm_90", "sm_100", "gfx942"}
    for row in rows:
        assert row["spilled_bytes"] == row["spill_instructions"] == 0, row
        if row["kernel"] == "gather_patches":  # 8 bytes a load (but for indices), 16 bytes a store, nothing shared
            assert set(row["store_bits"]) == {128} and row["load_bits"][64] >= 3, row
            assert row["shared_bytes"] == row["shared"] == 0, row
        if row["kernel"] == "update":  # of six tensors the block is read, and written of five and of the copies
            assert max(row["load_bits"]) == max(row["store_bits"]) == 128, row
            assert row["load_bits"][128] >= 6 and row["store_bits"][128] >= 5, row
        if row["kernel"] in ("attention", "attention_backward", "class_attention_backward", "norm_backward"):
            assert max(row["load_bits"]) == 128 and max(row["store_bits"]) >= 64, row
            assert bool(row["matrix"]) == row["kernel"].startswith("attention"), row
