#!/bin/sh
# nvidia-ml-py 13.615.71 and pynvml 11.5.3, both NVIDIA readers, in one environment: the old one is imported.
#
# Expected: `import pynvml` gives the newest reader installed, or the installer refuses the pair.
# Seen: nvidia-ml-py installs the file pynvml.py, pynvml 11.5.3 the folder pynvml/. Both are kept, and Python takes
# the folder. `pip show nvidia-ml-py` says 13.615.71, but the code that runs has half the names: none for the
# Blackwell architecture, for NUMA nodes or for the newer reading of temperatures. pynvml 13.0.1 has no such folder
# and is harmless.
# For a benchmark: a tool that asks for pynvml<12 makes another tool's GPU readings fail or fall silent in the
# same environment. A version from the package's metadata proves nothing: look at `pynvml.__file__`.
. "$(dirname "$0")/lib.sh"

needs nvidia-ml-py==13.615.71 pynvml==11.5.3

check <<'EOF'
import importlib.metadata
import importlib.util
import sys
import sysconfig
from pathlib import Path

import pynvml
from finding import observed

shadowed = Path(sysconfig.get_path("purelib"), "pynvml.py")
spec = importlib.util.spec_from_file_location("newest", shadowed)
newest = sys.modules["newest"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(newest)
version = importlib.metadata.version("nvidia-ml-py")
file = Path(pynvml.__file__)
observed(f"nvidia-ml-py {version} is installed, imported is {file.parent.name}/{file.name}", file.name == "__init__.py")
for name in ("NVML_DEVICE_ARCH_BLACKWELL", "nvmlDeviceGetTemperatureV", "nvmlDeviceGetNumaNodeId"):
    has = hasattr(pynvml, name), hasattr(newest, name)
    observed(f"{name}: imported {has[0]}, shadowed {has[1]}", has == (False, True))
missing = len(set(dir(newest)) - set(dir(pynvml)))
observed(f"{missing} of {len(dir(newest))} names are missing", missing > 1_000)
EOF
