"""`python -m headrace`: the command, where its script is not on the path."""

import sys

from headrace.cli import main

sys.exit(main())
