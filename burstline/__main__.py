"""`python -m burstline` is the command `burstline`."""

import sys

from burstline.cli import main

sys.exit(main())
