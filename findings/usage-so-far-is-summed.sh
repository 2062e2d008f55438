#!/bin/sh
# langchain-openai 1.7.4 and pydantic-ai-slim 2.68.0 against a server that sends its token counts with each event.
#
# Expected: the usage of a reply is the last count. Servers that count as they go (vLLM with
# `continuous_usage_stats`, for example) send the count so far in each event.
# Seen: both libraries add the counts of all events up. A reply of 10 tokens to a prompt of 20, in 13 events, is
# counted as 75 tokens of 260. The stream helper of the openai package (3.57.0) says 10 of 20.
# For a benchmark: tokens/s and cost from these libraries grow with the square of the length of the reply.
# Compare one reply with the server's own counters before the load.
. "$(dirname "$0")/lib.sh"

needs langchain-openai==1.7.4 langchain-core==1.8.3 'pydantic-ai-slim[openai]==2.68.0' openai==3.57.0

check <<'EOF'
import asyncio
import functools
import operator

from finding import ChatServer, observed
from langchain_openai import ChatOpenAI
from openai import OpenAI
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

server = ChatServer(n=10, counting=True)


async def pydantic_ai():
    model = OpenAIChatModel("m", provider=OpenAIProvider(base_url=server.url, api_key="none"))
    async with Agent(model).run_stream("hi") as reply:
        text = [part async for part in reply.stream_text(delta=True)]
        usage = reply.usage() if callable(reply.usage) else reply.usage
    assert "".join(text).split() == ["word"] * 10
    return usage.output_tokens, usage.input_tokens


with OpenAI(base_url=server.url, api_key="none").chat.completions.stream(
    model="m", messages=[{"role": "user", "content": "hi"}]
) as stream:
    usage = stream.get_final_completion().usage
true = usage.completion_tokens, usage.prompt_tokens
observed(f"openai: {true[0]} tokens of {true[1]}", true == (10, 20))

events = ChatOpenAI(base_url=server.url, api_key="none", model="m").stream("hi")
usage = functools.reduce(operator.add, events).usage_metadata
seen = usage["output_tokens"], usage["input_tokens"]
observed(f"langchain-openai: {seen[0]} tokens of {seen[1]}", seen == (75, 260))

seen = asyncio.run(pydantic_ai())
observed(f"pydantic-ai: {seen[0]} tokens of {seen[1]}", seen == (75, 260))
EOF
