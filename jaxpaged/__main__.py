"""`python -m jaxpaged`: the command line."""

import sys

from jaxpaged.cli import main

sys.exit(main())
