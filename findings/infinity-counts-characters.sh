#!/bin/sh
# infinity-emb 0.0.78 (an OpenAI-compatible server for embeddings): `usage.prompt_tokens` counts characters.
#
# Expected: tokens of the model's tokenizer, as the field's name says.
# Seen: a text of one token is counted as 9, one for each character. A text of 200 tokens, which the model cuts
# to its 64, is counted as 1999.
# For a benchmark: input tokens/s from this server's usage are several times too high, and more so for long
# words. They count text that the model never read. Count with the model's tokenizer, up to its maximum length.
. "$(dirname "$0")/lib.sh"

needs 'infinity-emb[server,torch]==0.0.78' torch==2.13.0 transformers==4.57.6 sentence-transformers==3.4.1

check <<'EOF'
import json
import sys
import urllib.request
from pathlib import Path

from finding import free_port, observed, running
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
vocabulary = {name: number for number, name in enumerate([*names.values(), "benchmark"])}
tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=64, **names)
fast.save_pretrained("model")
shape = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
BertModel(BertConfig(vocab_size=5, max_position_embeddings=64, **shape)).save_pretrained("model")

port = free_port()
url = f"http://127.0.0.1:{port}"
command = [str(Path(sys.executable).with_name("infinity_emb")), "v2", "--model-id", "./model"]
options = ["--host", "127.0.0.1", "--port", str(port), "--engine", "torch", "--device", "cpu", "--no-bettertransformer"]
with running(*command, *options, "--no-model-warmup", "--no-compile", ready=f"{url}/models"):
    for n in (1, 200):
        text = " ".join(["benchmark"] * n)
        body = json.dumps({"model": "model", "input": text}).encode()
        request = urllib.request.Request(f"{url}/embeddings", body, {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=30) as reply:
            counted = json.load(reply)["usage"]["prompt_tokens"]
        tokens, read = len(fast.tokenize(text)), len(fast(text, truncation=True)["input_ids"])
        seen = f"{tokens} tokens, of which the model reads {read}: counted as {counted}"
        observed(seen, counted == len(text) and read == min(n, 64))
EOF
