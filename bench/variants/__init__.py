"""Changes of the optimizer step that no GPU has shown to pay yet: applied from outside, timed by ``bench step``."""
