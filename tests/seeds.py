"""The seed of what tests draw: new in each session, printed at its end; TEST_SEED repeats one."""

import os
import secrets
from typing import Final

# Workers of a session inherit the environment, so all draw the same.
SEED: Final = int(os.environ.setdefault("TEST_SEED", str(secrets.randbelow(2**31))))
