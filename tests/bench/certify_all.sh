#!/bin/sh
# Certifies every load generator that is installed at two loads, three times each, in turn (Linux, a quiet machine):
#
#   sh tests/bench/certify_all.sh DIR OUT        DIR as peers_env.sh made it; OUT gets a folder per certificate
#
# Then all the lines for a README are printed. REPEATS, LOADS (names below) and TOOLS choose fewer.
set -eu

[ $# -eq 2 ] || { sed -n '2,6s/^# \{0,1\}//p' "$0" >&2; exit 2; }
dir=$(cd "$1" && pwd)
mkdir -p "$2"
out=$(cd "$2" && pwd)

client() { # TOOL: its command line
    case $1 in
    vllm | vllm-rust)
        rust=$([ "$1" = vllm ] || echo env VLLM_USE_RUST_BENCH=1)
        echo "$rust $dir/vllm/bin/python -m vllm.entrypoints.cli.main bench serve --backend vllm --base-url {url}" \
            "--model {model} --tokenizer {tokenizer} --dataset-name random --num-prompts {requests}" \
            "--random-input-len {prompt_tokens} --random-output-len {output_tokens} --ignore-eos" \
            "--request-rate {rate} --percentile-metrics ttft,tpot,itl,e2el --metric-percentiles 50,90,99" \
            "--disable-tqdm --save-result --result-dir {out} --result-filename result.json"
        ;;
    sglang)
        echo "$dir/sglang/bin/python -m sglang.benchmark.serving --backend vllm --base-url {url} --model {model}" \
            "--dataset-name random-ids --num-prompts {requests} --random-range-ratio 1" \
            "--random-input-len {prompt_tokens} --random-output-len {output_tokens} --disable-tqdm" \
            "--tokenizer {tokenizer} --output-file {out}/result.json"
        ;;
    guidellm)
        echo "$dir/guidellm/bin/guidellm run --disable-console-interactive" \
            "--data kind=synthetic_text,prompt_tokens={prompt_tokens},output_tokens={output_tokens}" \
            "--backend kind=openai_http,target={url},model={model},request_format=/v1/completions" \
            "--profile kind=throughput,max_concurrency={concurrency}" \
            "--constraint kind=max_requests,count={requests}" \
            "--tokenizer kind=huggingface_auto,model={tokenizer} --output kind=json,path={out}/result.json"
        ;;
    aiperf)
        # Offline it takes names of the Hub alone, no folders.
        echo "env -u HF_HUB_OFFLINE $dir/aiperf/bin/aiperf profile -m {model} --endpoint-type completions" \
            "--streaming --url {url} --ui none --concurrency {concurrency} --request-count {requests}" \
            "--isl {prompt_tokens} --osl {output_tokens} --extra-inputs ignore_eos:true" \
            "--use-server-token-count --tokenizer {tokenizer} --output-artifact-dir {out}"
        ;;
    esac
}

certify() { # TOOL LOAD K
    case $2 in
    100) flags="--requests 100 --prompt-tokens 512 --output-tokens 200" ;;
    1000) flags="--requests 1000 --prompt-tokens 512 --output-tokens 128" ;;
    *) echo "LOADS: $2: expected 100 or 1000" >&2; exit 2 ;;
    esac
    set -- "$1" "$out/$1-$2-$3"
    [ "$1" = burstline ] || set -- "$@" --client "$(client "$1")"
    name=$1 folder=$2
    shift 2
    # Exit code 4 says that there are findings.
    burstline certify $flags "$@" --out "$folder" >"$folder.txt" || [ $? -eq 4 ] || echo "$name: see $folder.txt" >&2
}

for k in $(seq "${REPEATS:-3}"); do
    for load in ${LOADS:-100 1000}; do
        for tool in ${TOOLS:-burstline vllm sglang guidellm aiperf}; do
            [ "$tool" = burstline ] || [ -x "$dir/${tool%-rust}/bin/python" ] || continue
            certify "$tool" "$load" "$k"
        done
    done
done
for text in "$out"/*.txt; do
    echo "$(basename "$text" .txt): $(tail -n 1 "$text")"
done
