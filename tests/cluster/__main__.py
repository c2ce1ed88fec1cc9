"""`python -m tests.cluster`."""

import sys

from .cli import main

sys.exit(main())
