#!/bin/sh
# amdsmi 7.0.2 (AMD's reader for its GPUs): without the driver's library, `import amdsmi` raises KeyError.
#
# Expected: the package imports and its `amdsmi_init` fails, or the import raises ImportError or OSError.
# Seen: KeyError: 'libamd_smi.so', and two lines on standard output.
# For a benchmark: a tool that reads GPUs of any maker guards the import with `except ImportError`. With amdsmi
# installed, it then ends on each machine without AMD's library, and its standard output, perhaps JSON, has two lines
# more. Catch Exception around this import, and do it in a child process where the output matters.
. "$(dirname "$0")/lib.sh"

needs amdsmi==7.0.2

check <<'EOF'
import subprocess
import sys

from finding import observed

PROGRAM = """
import sys
try:
    import amdsmi
except ImportError:
    sys.exit("ImportError")
except Exception as error:
    sys.exit(f"{type(error).__name__}: {error}")
"""
child = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60)
if child.returncode == 0:
    sys.stderr.write("amdsmi's library is installed here: this cannot be tried.\n")
    sys.exit(2)
lines = child.stdout.splitlines()
text = f"import amdsmi: {child.stderr.strip()}, lines on standard output: {len(lines)}"
observed(text, child.stderr.startswith("KeyError") and len(lines) == 2)
EOF
