#!/bin/sh
# scipy 1.17.1, numpy 2.4.6: `import scipy.special` loads a compiler's front end and a test runner.
#
# Expected: numpy's public names are listed, those of its heavy subpackages are loaded on use: `import numpy` does so.
# Seen: `import scipy.special`, for one quantile of Student's t, loads `numpy.f2py` (which reads Fortran),
# `numpy.testing` and `unittest`, and with them charset_normalizer where that is installed. scipy's layer for array
# libraries takes `*` from numpy, and `*` asks for each public name, the lazy ones too.
# For a benchmark: a tool that prints a confidence interval pays for it at each start, in each of its processes. Import
# scipy after the load, or not at all where the standard library has the function (`statistics.NormalDist`).
. "$(dirname "$0")/lib.sh"

needs scipy==1.17.1 numpy==2.4.6

check <<'EOF'
import subprocess
import sys

from finding import observed


def loaded(statement):
    code = f"import sys; {statement}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


HEAVY = {"numpy.f2py.crackfortran", "numpy.testing", "unittest.case"}
plain, special = loaded("import numpy"), loaded("import scipy.special")
observed(f"import numpy loads of them: {sorted(plain & HEAVY)}", not plain & HEAVY)
observed(f"import scipy.special loads: {sorted(special & HEAVY)}", special >= HEAVY)
star = loaded("from numpy import *")
observed(f"from numpy import * loads: {sorted(star & HEAVY)}", star >= HEAVY)
EOF
