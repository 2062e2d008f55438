#!/bin/sh
# prepare-model.sh PROFILE MODEL [TGI_MODEL TOKENIZER]: what a profile of docker-compose.yml needs before its server
# starts. A MODEL below /generated is made if it is not there; any other is left as it is.
set -eu
umask 0 # another caller may replace it
generated=${GENERATED:-/generated} profile=$1 model=$2

fail() { printf 'error: %s\n' "$*" >&2; exit 2; }

case $model in
"$generated"/?*)
    burstline make-model "$model" --like "${model##*/}" --weights --unless-exists
    ;;
/*)
    [ -e "$model" ] || fail "MODEL=$model is not in the container: MODELS=FOLDER shows a folder of yours as /models"
    ;;
*)
    [ "$profile" != lightllm ] ||
        fail "MODEL=$model: LightLLM downloads nothing; expected a folder: MODELS=FOLDER MODEL=/models/NAME"
    [ "$profile" != tgi ] || { [ -n "${3:-}" ] && [ -n "${4:-}" ]; } ||
        fail "MODEL=$model: TGI needs TGI_MODEL=$model and TOKENIZER=FOLDER as well, for its prompts are texts"
    ;;
esac
[ "$profile" = tgi ] || exit 0
if [ -n "${3:-}" ] && [ "$3" != "$model" ]; then
    fail "TGI_MODEL=$3 and MODEL=$model differ: the prompts would be made for another model; give both or neither"
fi
# TGI cannot ignore the end of text, so it serves links to a copy of the model without an end token.
if [ -d "$model" ]; then
    rm -rf "$generated/endless"
    python3 -c "import sys; from pathlib import Path; from burstline.servers.engines.tgi import endless_copy
endless_copy(Path(sys.argv[1]), Path(sys.argv[2]))" "$model" "$generated/endless"
fi
