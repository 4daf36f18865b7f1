"""What the programs share around a training step: options, opening and going on with a run, its loop, its report."""

__version__ = "0.2.0"

import os

# Settings of a GPU's driver, which reads them when a library first calls it; what the user has set stays. All the
# hardware queues that it has: a decoder has 15 streams, and in the 8 queues that are the default its work gets behind a
# training step, and waits for it. And room for the launches of several recorded steps: a launch that finds none blocks,
# and with it those of other threads. (An H200 waited for images 16 % of the time; with both and ``training.AHEAD``,
# 0.5 %.)
DRIVEN = {"CUDA_DEVICE_MAX_CONNECTIONS": "32", "CUDA_SCALE_LAUNCH_QUEUES": "4x"}
for _name, _value in DRIVEN.items():
    os.environ.setdefault(_name, _value)
