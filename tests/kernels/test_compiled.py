import pytest

from kernels.compiled import compile_for


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_compiled_for_the_large_recipes(capability):
    """ViT-S/16 at 224 pixels; and in the PTX of the gather what its docstring says."""
    made = {name: kernel.asm for name, kernel in compile_for(capability)}
    for name in ("attention", "attention_backward"):  # 49 kept patches and the class token; rows of 6 heads of 64
        assert all(f"dense<{number}>" in made[name]["ttir"] for number in (50, 6 * 64, 3 * 6 * 64)), name
    ptx = made["gather_patches"]["ptx"]
    assert "fma" not in ptx  # a subtraction and a multiplication, each rounded: so every device has the same result
    assert "ld.global.b64" in ptx and "st.global.v4.b32" in ptx  # whole words in, 16 bytes a channel out
    assert all(f"dense<{number}>" in made["gather_patches"]["ttir"] for number in (49, 14 * 14, 14 * 16))
