"""What the command's exit code says; scripts and CI rely on these."""

DONE = 0
OUR_BUG = 1
USAGE = 2
TARGET_MISSED = 3
INCONCLUSIVE = 4
ENGINE_FAILED = 5
INTERRUPTED = 130
