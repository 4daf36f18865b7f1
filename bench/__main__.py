"""python -m bench SUBJECT [options]; ``--help`` behind a subject shows its options."""

import importlib
import signal
import sys

SUBJECTS = {
    "compile": "registers, spills and instructions of every kernel, for GPUs that need not be present",
    "index": "the scan, a start from the cache, an epoch's order, changes; against torchvision's ImageFolder",
    "objects": "images from an object store, by the number of requests at a time, against DALI's client (needs DALI)",
    "machine": "this machine: card, versions, measured ceilings of copying and of matrix products",
    "gpu_tests": "the tests marked gpu, as JSON",
    "kernels": "sampling and gathering against the alternatives",
    "step": "the optimizer step on synthetic crops: against the plain form and the roofline; memory; profile",
    "big": "a step, a checkpoint and the memory of a rank for large models, on one rank and sharded over two",
    "products": "the products of a block, shape by shape: libraries, GELU inside, fp8",
    "passes": "what lies between the products: norms, GELU, attention of the class token, as compiled and by kernels",
    "baselines": "a training step of APS beside MoCo v3, MAE, SimMIM and iBOT: FLOPs, memory, time",
    "once": "every kernel once, for the two that follow",
    "sanitizer": "compute-sanitizer on every kernel: reads and writes beside the memory, races of the sampler",
    "counters": "what Nsight Compute counts of each kernel: bytes of DRAM, sectors, time",
    "collectives": "what ranks exchange: NCCL among one, in a CUDA graph too; two gloo ranks on one card against one",
    "kinds": "the input path on progressive JPEGs and on 24 megapixels: images per second, memory (needs DALI)",
    "pipeline": "decoded and augmented images per second, against torchvision; cost of each stage; parity (needs DALI)",
    "embed": "embed.py beside Pillow, timm and a DataLoader: images per second, and how alike the features are",
    "host": "what the thread that launches kernels spends on a batch and on a checkpoint (needs DALI)",
    "soak": "memory, and what bad files cost, over thousands of batches (needs DALI)",
    "attention": "what an encoder looks at, and nearest neighbours, as a picture (needs DALI and matplotlib)",
    "scaling": "8 and 64 GPUs, predicted from the figures of one",
    "learning": "the table of learning.sh: what pretraining is worth, against training from scratch",
    "labels": "the table of labels.sh: what pretraining is worth where labels are few",
    "train": "train.py end to end, and the share of time it waits for data (needs DALI and tyro)",
    "waits": "what train.py waits for where it waits for data: in several ways, and a trace (needs DALI and tyro)",
    "all": "every subject in sequence, each behind its tests, to one folder",
    "report": "all results as a page, plots and the tables of README and docs/ (needs matplotlib)",
    "compare": "two results, folders of results or commits: ratios; exits with 1 where one is slower",
    "curves": "loss, accuracy and speed of one or several runs as one PNG (needs matplotlib)",
}


def main(arguments: list[str]) -> int:
    if not arguments or arguments[0] not in SUBJECTS:
        print("usage: python -m bench SUBJECT [options]\n")
        print("\n".join(f"  {name:11} {text}" for name, text in SUBJECTS.items()))
        return 0 if arguments[:1] in ([], ["--help"], ["-h"]) else 2
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # at the end of a time limit, clear up as on Ctrl-C
    try:
        return importlib.import_module(f"bench.{arguments[0]}").main(arguments[1:])
    except KeyboardInterrupt:
        return 130
    except ImportError as error:
        if "matplotlib" not in (error.name or ""):  # what the others lack is a fault
            raise
        print(f"bench: {error}; expected what pip install '.[bench]' brings", file=sys.stderr)
        return 2
    except (FileExistsError, NotADirectoryError) as error:
        print(f"bench: {error.filename} is a file, or below one; expected a folder", file=sys.stderr)
        return 1
    except ValueError as error:
        from pipeline import TooManyBadFiles

        if not isinstance(error, TooManyBadFiles):
            raise
        print(f"bench: {error}; repair them, or leave them out of --images", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
