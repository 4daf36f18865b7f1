"""What the programs share around a training step: options, opening and going on with a run, its loop, its report."""

__version__ = "0.2.0"

import os

# For the driver of a GPU, unless they are set; before any library asks it for the first time. All the hardware queues
# that it has: a decoder has 15 streams, and by default there are 8 queues, where what comes behind a step waits for
# that step (an H200 waited for images 16 % of the time, with both of these and ``training.AHEAD`` .5 %). And room for
# the launches of several recorded steps: whoever finds none waits, and others with him.
DRIVEN = {"CUDA_DEVICE_MAX_CONNECTIONS": "32", "CUDA_SCALE_LAUNCH_QUEUES": "4x"}
for _name, _value in DRIVEN.items():
    os.environ.setdefault(_name, _value)
