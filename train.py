"""Train a model from one YAML file: ``torchrun --nproc_per_node=2 train.py --config … --data_dir …``."""

import sys

from torchtitan_npu.cli import train_main

if __name__ == "__main__":
    sys.exit(train_main())
