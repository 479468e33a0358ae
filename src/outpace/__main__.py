"""`python -m outpace`, as in `torchrun ... -m outpace train`."""

import sys

from outpace.cli import main

if __name__ == "__main__":
    sys.exit(main())
