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
) -> list[TextGenerationStreamOutput] | None:
    """The events of one streamed, greedy generation at a text-generation-inference `url`.

    None where the status of the reply is an error's: this client closes such a stream unread. Raises
    RefusalError where the server finds fault with the request, EngineError for any other failure.
    """
    # Imported here: it takes half a second, and only who starts or attaches to TGI needs it.
    from huggingface_hub.errors import HfHubHTTPError, InferenceTimeoutError, ValidationError

    try:
        return asyncio.run(_generate(url, prompt, n_tok, api_key, timeout_s))
    except ValidationError as error:
        raise RefusalError(f"a request for {n_tok} token is refused: {error}") from error
    except HfHubHTTPError:
        return None
    except InferenceTimeoutError as error:
        raise EngineError(f"{url}: no answer within {timeout_s:g} s") from error
    except Exception as error:
        kinds = {kind.__name__ for kind in type(error).__mro__}
        if "ResponseNotRead" in kinds:
            return None  # it wants to quote a 422 that it has not read
        if not kinds & {"HTTPError", "TransportError"}:
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
