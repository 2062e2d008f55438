#!/bin/sh
# Builds llama.cpp's llama-server for this machine's CPU, from the source that the sdist of llama-cpp-python
# on PyPI vendors. Prints how to use it. The second time it costs nothing.
#
#   scripts/build-llama-server.sh DIR          e.g. ~/.local/share/burstline-llama (8 minutes on two cores)
#
# It needs a C++17 compiler (on Debian and Ubuntu: apt install g++). CMake and Ninja are taken from PyPI where
# they are not installed. Models are GGUF files: `burstline make-model DIR --like tiny --format gguf`.
#
# PYTHON names the interpreter whose pip fetches the source (default python3), JOBS how many compilers run.
set -eu

VERSION=0.3.36

[ $# -eq 1 ] || { sed -n '2,10s/^# \{0,1\}//p' "$0" >&2; exit 2; }
dir=$1
stamp=$dir/.llama-cpp-python-$VERSION

say() { printf '%s\n' "$*" >&2; }

finish() {
    say "llama-server (llama-cpp-python $VERSION) is in $dir. To have burstline start it:"
    echo "export BURSTLINE_LLAMA_SERVER=$(cd "$dir" && pwd)/llama-server"
}

if [ -e "$stamp" ]; then finish; exit 0; fi

command -v "${CXX:-c++}" >/dev/null 2>&1 || {
    say "No C++ compiler (${CXX:-c++}). On Debian and Ubuntu: apt install g++"
    exit 1
}

mkdir -p "$dir"
build=$(mktemp -d "$dir/build.XXXXXX")
trap 'rm -rf "$build"' EXIT
trap 'exit 1' HUP INT TERM
log=$dir/build.log

"${PYTHON:-python3}" -m venv "$build/venv"
PATH=$build/venv/bin:$PATH
for tool in cmake ninja; do
    command -v "$tool" >/dev/null 2>&1 || pip install -qq "$tool"
done

say "Fetching llama-cpp-python $VERSION ..."
pip download -qq --no-deps --no-binary llama-cpp-python -d "$build" "llama-cpp-python==$VERSION"
tar -xzf "$build"/llama_cpp_python-"$VERSION".tar.gz -C "$build"

# Everything in one file: no library of its own to find. The web page and TLS need a download and OpenSSL;
# a server for benchmarks needs neither.
say "Building llama-server (log: $log) ..."
if ! {
    cmake -S "$build"/llama_cpp_python-"$VERSION"/vendor/llama.cpp -B "$build/out" -G Ninja \
        -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=OFF -DLLAMA_BUILD_SERVER=ON -DLLAMA_BUILD_TOOLS=ON \
        -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_APP=OFF \
        -DLLAMA_CURL=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF &&
        cmake --build "$build/out" --target llama-server ${JOBS:+--parallel "$JOBS"}
} >"$log" 2>&1; then
    tail -n 20 "$log" >&2
    exit 1
fi
cp "$build/out/bin/llama-server" "$dir/llama-server"
"$dir/llama-server" --version >>"$log" 2>&1
touch "$stamp"
finish
