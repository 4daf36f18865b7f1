"""What the first run of a process takes seconds for, and those after it do not: reading options, and DALI's translation
of a graph. Imported by the process that ``forks`` forks."""

import train
from pipeline import Augmentation, graph

train.parse(["--recipe", "toy"])
graph.pipeline(iter([]), Augmentation().views(), image_size=8, batch_size=1, threads=1, device_id=None)
