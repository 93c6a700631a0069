"""`python -m lopa` is `lopa`."""

import sys

from lopa.cli.main import main

sys.exit(main())
