"""Text to token files: ``python prepare_data.py --input corpus.txt --output train.jsonl --tokenizer byte``."""

import sys

from torchtitan_npu.cli_prepare import main

if __name__ == "__main__":
    sys.exit(main())
