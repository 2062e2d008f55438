"""Generating through Hugging Face's own client: the readiness of servers that it was written for."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from servers.engine import EngineError
from servers.host.ready import RefusalError

if TYPE_CHECKING:
    from huggingface_hub import TextGenerationStreamOutput


def generate(
    url: str, prompt: str, n_tok: int, *, api_key: str | None, timeout_s: float
) -> list[TextGenerationStreamOutput]:
    """The events of one streamed, greedy generation at a text-generation-inference `url`.

    Raises RefusalError where the server finds fault with the request, EngineError for any other failure.
    """
    # Imported here: it takes half a second, and only who starts or attaches to TGI needs it.
    from huggingface_hub.errors import HfHubHTTPError, InferenceTimeoutError, ValidationError

    try:
        return asyncio.run(_generate(url, prompt, n_tok, api_key, timeout_s))
    except ValidationError as error:
        raise RefusalError(f"a request for {n_tok} token is refused: {error}") from error
    except HfHubHTTPError as error:
        status = error.response.status_code
        words = f"a request for {n_tok} token answers {status}: {error.response.text[:300]}"
        kind = RefusalError if 400 <= status < 500 and status != 429 else EngineError
        raise kind(words) from error
    except InferenceTimeoutError as error:
        raise EngineError(f"{url}: no answer within {timeout_s:g} s") from error
    except Exception as error:
        if not _is_transport_error(error):
            raise
        raise EngineError(f"{url}: {error or type(error).__name__}") from error


async def _generate(
    url: str, prompt: str, n_tok: int, api_key: str | None, timeout_s: float
) -> list[TextGenerationStreamOutput]:
    from huggingface_hub import AsyncInferenceClient, get_async_session, set_async_client_factory

    # No proxy of the environment stands between us and a server. The type is asked for: versions 1 and 2 of
    # huggingface_hub use different HTTP libraries.
    http_client = type(get_async_session())
    set_async_client_factory(lambda: http_client(trust_env=False))
    # Without a token it would send the one that the user has saved for the Hub, to whatever server this is.
    async with AsyncInferenceClient(model=url, token=api_key or "none", timeout=timeout_s) as client:
        events = await client.text_generation(
            prompt, stream=True, details=True, max_new_tokens=n_tok, do_sample=False, return_full_text=False
        )
        return [event async for event in events]


def _is_transport_error(error: Exception) -> bool:
    return any(kind.__name__ in ("HTTPError", "TransportError") for kind in type(error).__mro__)
