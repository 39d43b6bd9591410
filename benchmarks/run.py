"""The benchmark without the console script: python -m benchmarks.run CONFIG.yaml"""

import sys

from sglang_parse.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["bench", *sys.argv[1:]]))
