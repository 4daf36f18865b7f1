"""What the programs share around a training step: options, opening and going on with a run, its loop, its report."""

__version__ = "0.2.0"
