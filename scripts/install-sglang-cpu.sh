#!/bin/sh
# Makes a separate Python environment with SGLang on a CPU, so that `burstline` can start a real SGLang where
# there is no GPU. Prints how to use it. The second time it costs nothing.
#
#   scripts/install-sglang-cpu.sh DIR          e.g. ~/.local/share/burstline-sglang (about 11 GB)
#
# SGLang's wheels are built for CUDA. They serve on a CPU too, but load the driver's library (libcuda.so.1),
# which a machine without an NVIDIA driver lacks. DIR/lib/no-cuda gets a library of that name in which every
# function answers "no device"; burstline puts it on LD_LIBRARY_PATH of the servers that it starts from DIR,
# and of nothing else. Building it takes a C compiler and nm (on Debian and Ubuntu: apt install gcc libc6-dev).
#
# PYTHON names the interpreter to build on (default python3; 3.11 to 3.13, Linux on x86-64).
set -eu

VERSION=0.5.23

[ $# -eq 1 ] || { sed -n '2,13s/^# \{0,1\}//p' "$0" >&2; exit 2; }
. "$(dirname "$0")/virtualenv.sh"
dir=$1
stub=$dir/lib/no-cuda
stamp=$dir/.sglang-$VERSION-cpu

finish() {
    say "SGLang $VERSION for CPUs is in $dir. To have burstline start it:"
    echo "export BURSTLINE_SGLANG_PYTHON=$(cd "$dir" && pwd)/bin/python"
}

if [ -e "$stamp" ]; then finish; exit 0; fi

for tool in "${CC:-cc}" nm; do
    command -v "$tool" >/dev/null 2>&1 || {
        say "No $tool. On Debian and Ubuntu: apt install gcc libc6-dev"
        exit 1
    }
done

say "Installing SGLang $VERSION into $dir ..."
make_venv "${PYTHON:-python3}" "$dir"
uv_pip --compile-bytecode "sglang==$VERSION"

# CUDA_ERROR_NO_DEVICE is 100. The driver's functions are those that start with cu and a capital letter.
say "Building a libcuda.so.1 that knows no device ..."
site=$("$venv_python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
mkdir -p "$stub"
find "$site/torch" "$site/sgl_kernel" "$site"/*kernel* -name '*.so*' -type f -exec nm -D --undefined-only {} + 2>/dev/null |
    sed -n 's/.* U \(cu[A-Z][A-Za-z0-9_]*\).*/\1/p' | grep -v '^cu\(da\|blas\|File\|dnn\|fft\|rand\|solver\|sparse\|pti\)' |
    sort -u | sed 's/.*/int &(void) { return 100; }/' >"$stub/libcuda.c"
"${CC:-cc}" -shared -fPIC -Wl,-soname,libcuda.so.1 -o "$stub/libcuda.so.1" "$stub/libcuda.c"

LD_LIBRARY_PATH=$stub${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH} SGLANG_USE_CPU_ENGINE=1 "$venv_python" -c "
import sgl_kernel, sglang
assert sglang.__version__ == '$VERSION', sglang.__version__"
touch "$stamp"
finish
