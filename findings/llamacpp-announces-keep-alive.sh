#!/bin/sh
# llama.cpp's server (build 11549, in xllamacpp 2026.10.11549): it closes after each streamed reply what it
# says it keeps.
#
# Expected: HTTP/1.1 with `Keep-Alive: timeout=5, max=100` and without `Connection: close`: the connection serves
# the next request, as it does when replies are not streamed.
# Seen: after a streamed reply, read to its end, the connection is closed. A client that sends its next request
# over it gets no reply.
# For a benchmark: each streamed request needs a new connection: a TCP handshake, and with TLS its own, in each
# TTFT. A client that trusts the header meets the close: it sends the request a second time or counts a failure.
. "$(dirname "$0")/lib.sh"

needs xllamacpp==2026.10.11549 gguf==0.19.0 numpy==2.4.6

check <<'EOF'
import http.client
import json

import gguf
import numpy as np
import xllamacpp
from finding import free_port, observed

TOKENS = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
WIDTH, INNER = 64, 128


def write_model(path):
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(512)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(1)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("llama")
    writer.add_token_list(TOKENS)
    writer.add_token_scores([0.0] * len(TOKENS))
    writer.add_token_types([2, 3, 3] + [6] * 256)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    random = np.random.default_rng(0)
    shapes = {"token_embd": (len(TOKENS), WIDTH), "output_norm": (WIDTH,), "output": (len(TOKENS), WIDTH)}
    shapes |= {f"blk.0.{name}": (WIDTH,) for name in ("attn_norm", "ffn_norm")}
    shapes |= {f"blk.0.attn_{name}": (WIDTH, WIDTH) for name in ("q", "k", "v", "output")}
    shapes |= {f"blk.0.ffn_{name}": (INNER, WIDTH) for name in ("gate", "up")} | {"blk.0.ffn_down": (WIDTH, INNER)}
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", random.normal(0, 0.05, shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def replies(port, stream):
    """How many of two requests over one connection are answered, and the headers of the first reply."""
    connection, n, headers = http.client.HTTPConnection("127.0.0.1", port, timeout=30), 0, {}
    connection.auto_open = 0
    connection.connect()
    for _ in range(2):
        body = {"prompt": "ab", "max_tokens": 4, "ignore_eos": True, "stream": stream}
        try:
            connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
            reply = connection.getresponse()
            assert reply.status == 200 and reply.version == 11 and reply.read()
        except (ConnectionError, http.client.NotConnected):
            break
        n, headers = n + 1, headers or {name.lower(): value for name, value in reply.getheaders()}
    connection.close()
    return n, headers


write_model("tiny.gguf")
params = xllamacpp.CommonParams()
params.model.path, params.port, params.n_ctx, params.n_parallel = "tiny.gguf", free_port(), 512, 1
server = xllamacpp.Server(params)
for stream, expected in ((False, 2), (True, 1)):
    n, headers = replies(params.port, stream)
    announced = f"Connection: {headers.get('connection')}, Keep-Alive: {headers.get('keep-alive')}"
    keeps = headers.get("connection", "").lower() != "close" and "keep-alive" in headers
    kind = "streamed" if stream else "whole"
    observed(f"{kind} replies, {announced}: {n} of 2 requests answered over a connection", n == expected and keeps)
EOF
