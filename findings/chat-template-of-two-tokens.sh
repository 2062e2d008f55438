#!/bin/sh
# transformers 5.24.0: `len(tokenizer.apply_chat_template(messages))` is 2 for every prompt.
#
# Expected: the number of tokens, as in transformers 4, where the call returned a list of token ids.
# Seen: version 5 returns a dictionary of `input_ids` and `attention_mask`, unless `return_dict=False` is given.
# Its length is 2, for a prompt of 100 tokens and for one of 1,000. Nothing is raised. 4.57.6 gives 100 and 1,000.
# For a benchmark: a script that counts or filters prompts this way takes each for 2 tokens: input tokens/s and
# prefill rates are far too low, and no prompt is too long. Take `len(...["input_ids"])`, and hold a prompt's count
# against the server's `usage`.
. "$(dirname "$0")/lib.sh"

needs transformers==5.24.0 tokenizers==0.23.3 jinja2==3.1.6

check <<'EOF'
from finding import observed
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, "word": 1}, unk_token="[UNK]"))
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]")
fast.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
for n in (100, 1_000):
    ids = fast.apply_chat_template([{"role": "user", "content": "word " * n}])
    plain = fast.apply_chat_template([{"role": "user", "content": "word " * n}], return_dict=False)
    text = f"{n} words: length {len(ids)} ({type(ids).__name__}), without a dictionary {len(plain)}"
    observed(text, len(ids) == 2 and len(plain) == n)
EOF
