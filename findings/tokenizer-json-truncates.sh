#!/bin/sh
# tokenizers 0.23.3 and transformers 5.24.0 read one tokenizer.json: they count different numbers of tokens.
#
# Expected: both count the tokens of a text, since both run the same tokenizer from the same file.
# Seen: a tokenizer.json can hold settings for truncation and padding, and those of several
# embedding models do. `Tokenizer.from_file` applies them unasked: of a text of 100 tokens it returns 16, and of a text
# of one token also 16. AutoTokenizer switches both off: 100 and 1.
# For a benchmark: tokens counted with `tokenizers` alone are the length in the file, whatever was served. Call
# `no_truncation()` and `no_padding()` first.
. "$(dirname "$0")/lib.sh"

needs tokenizers==0.23.3 transformers==5.24.0

check <<'EOF'
from pathlib import Path

from finding import observed
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer

tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, "word": 1}, unk_token="[UNK]"))
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer.enable_truncation(16)
tokenizer.enable_padding(length=16)
Path("model").mkdir()
tokenizer.save("model/tokenizer.json")
Path("model/tokenizer_config.json").write_text(
    '{"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "[UNK]", "model_max_length": 100000}'
)
alone = Tokenizer.from_file("model/tokenizer.json")
whole = AutoTokenizer.from_pretrained("model")
for n, wanted in ((100, 16), (1, 16)):
    text = " ".join(["word"] * n)
    counts = len(alone.encode(text).ids), len(whole(text)["input_ids"])
    observed(f"{n} words: tokenizers {counts[0]} tokens, transformers {counts[1]}", counts == (wanted, n))
alone.no_truncation()
alone.no_padding()
n = len(alone.encode("word " * 100).ids)
observed(f"100 words after no_truncation() and no_padding(): {n} tokens", n == 100)
EOF
