import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from burstline.bench import plan_for_server
from burstline.bench.plan_for_server import plan_for
from burstline.bench.server_session import Site
from burstline.servers.host.ready import Startup
from burstline.servers.identity import Identity
from burstline.servers.launch import Launch
from burstline.servers.messages import Target
from burstline.servers.registry import ENGINES
from burstline.workloads.load import Load, load_of
from burstline.workloads.plan import Plan
from burstline.workloads.request import WorkloadError
from burstline.workloads.spec import DataSource, LoadSpec
from burstline.workloads.text_prompts import words_of
from tests.burstline.answering import answering
from tests.servers.tiny_model import make_tiny_model

ENGINE = ENGINES["transformers"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


@contextmanager
def counting(count: object) -> Iterator[Site]:
    """A text-only server that counts prompts by `count`, which may be None."""

    def answer(_: str, asked: Any) -> tuple[int, object]:
        reply: dict[str, object] = {"choices": [{"index": 0, "text": "a", "finish_reason": "length"}]}
        if count is not None:
            usage = {"prompt_tokens": count(asked["prompt"]), "completion_tokens": 1}  # type: ignore[operator]
            reply["usage"] = usage
        return 200, reply

    with answering(answer) as url:
        target = Target(url, "m")
        yield Site(ENGINE, target, Identity("transformers"), None, None, Startup(0.0), ENGINE.capabilities)


def load(tokenizer: Path | None = None) -> Load:
    return load_of(
        LoadSpec(requests=5, prompt_tokens="30..90", output_tokens="4", salt="5eed", tokenizer=tokenizer)
    )


def test_a_server_that_takes_text_only_gets_text_of_the_planned_lengths(
    folder: Path, tokenizer: Tokenizer
) -> None:
    words = words_of(tokenizer)
    said: list[str] = []
    with counting(lambda text: len(tokenizer.encode(text).ids)) as site:
        plan, _ = plan_for(load(), site, str(folder), said.append)
    assert all(request.prompt_ids is None for request in plan.requests)
    assert words.count(texts_of(plan)) == [request.n_prompt_tok for request in plan.requests]
    assert said == []


def texts_of(plan: Plan) -> list[str]:
    return [request.prompt_text or "" for request in plan.requests]


def test_what_the_server_adds_to_every_prompt_is_found_out_and_left_out(
    folder: Path, tokenizer: Tokenizer
) -> None:
    words = words_of(tokenizer)
    with counting(lambda text: len(tokenizer.encode(text).ids) + 11) as site:
        plan, _ = plan_for(load(folder), site, None, lambda words: None)
    assert words.count(texts_of(plan)) == [request.n_prompt_tok - 11 for request in plan.requests]


def test_a_server_that_does_not_count_is_trusted_and_the_user_is_told(folder: Path) -> None:
    said: list[str] = []
    with counting(None) as site:
        plan_for(load(folder), site, None, said.append)
    assert "does not report prompt lengths" in said[0]


def test_a_tokenizer_that_is_not_the_servers_is_found_out(folder: Path) -> None:
    wrong = pytest.raises(WorkloadError, match="it uses another tokenizer; pass --tokenizer DIR")
    with counting(len) as site, wrong:
        plan_for(load(), site, str(folder), lambda words: None)


@pytest.mark.parametrize("count", [len, lambda text: 7, lambda text: 2 * len(text.split())])
def test_a_server_that_counts_otherwise_is_sent_what_the_given_tokenizer_counts(
    folder: Path, tokenizer: Tokenizer, count: Callable[[str], int]
) -> None:
    """Characters, a constant, twice as many: as mocks and gateways count."""
    told: list[str] = []
    with counting(count) as site:
        plan, _ = plan_for(load(folder), site, None, told.append)
    assert words_of(tokenizer).count(texts_of(plan)) == [request.n_prompt_tok for request in plan.requests]
    assert "the server counts" in told[0]


def test_of_a_server_whose_lengths_cannot_be_forced_no_end_is_too_early(folder: Path) -> None:
    with counting(None) as site:
        free = replace(site, capabilities=replace(site.capabilities, forced_output_length=False))
        forced, _ = plan_for(load(folder), site, None, lambda words: None)
        plan, _ = plan_for(load(folder), free, None, lambda words: None)
    assert {request.ignore_eos for request in forced.requests} == {True}
    assert {request.ignore_eos for request in plan.requests} == {False}
    assert plan.sha256 == forced.sha256
    assert plan.contents_sha256 != forced.contents_sha256


def test_without_a_tokenizer_the_user_is_asked_for_one(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with (
        counting(len) as site,
        pytest.raises(WorkloadError, match=r"pass --tokenizer DIR .*no tokenizer\.json"),
    ):
        plan_for(load(tmp_path), site, None, lambda words: None)


def test_a_hub_that_does_not_answer_is_given_up_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    waits = threading.Event()

    def hangs(url: str, **_: object) -> None:
        asked.append(url)
        waits.wait(20)

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", hangs)
    monkeypatch.setattr(plan_for_server, "HUB_TIMEOUT_S", 0.05)
    with pytest.raises(TimeoutError, match=r"asking for https://.*no answer within 0\.05 s"):
        plan_for_server._from_hub("nobody/none-such")
    waits.set()
    assert len(asked) == 1


def test_an_offline_machine_is_told_at_once_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(WorkloadError, match="nobody/none-such is not in the Hugging Face cache"):
        plan_for_server._from_hub("nobody/none-such")


def test_natural_ends_are_asked_for_where_forced_ones_would_do(folder: Path) -> None:
    with counting(lambda prompt: len(prompt.split())) as site:
        natural = load(folder)
        natural = replace(natural, spec=replace(natural.spec, ends="natural"))
        plan, _ = plan_for(natural, site, None, lambda words: None)
    assert {request.ignore_eos for request in plan.requests} == {False}


@pytest.mark.parametrize("flag", [(), ("--no-continuous-batching",)])
@pytest.mark.parametrize("temperature", [None, 0.0, 0.7])
def test_no_sampling_is_asked_for_that_the_first_request_would_undo(
    folder: Path, flag: tuple[str, ...], temperature: float | None
) -> None:
    warm = load_of(replace(load(folder).spec, temperature=temperature))
    with counting(lambda prompt: len(prompt.split())) as site:
        started = replace(site, launch=Launch(("transformers", "serve", *flag)))
        refused = bool(temperature) and not flag
        with pytest.raises(WorkloadError, match="--no-continuous") if refused else nullcontext():
            plan_for(warm, started, None, lambda words: None)
        plan_for(warm, site, None, (told := list[str]()).append)
    assert any("unless it was started with --no-continuous" in words for words in told) == bool(temperature)


CHAT = [{"role": "user", "content": "Say it."}]
SEEN = [
    {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}]}
]
SAID = {"role": "assistant", "content": "It."}
ROWS: dict[str, tuple[list[dict[str, object]], dict[str, object], list[int] | None]] = {
    "chats with lengths": ([{"messages": CHAT, "output_tokens": n} for n in (3, 7)], {}, [3, 7]),
    "chats without": ([{"messages": CHAT}], {}, [5]),
    "chats with replies, which nobody can count": ([{"messages": [*CHAT, SAID]}], {}, [5]),
    "images": ([{"messages": SEEN, "output_tokens": 3}], {}, [3]),
    "conversations": ([{"messages": [*CHAT, SAID, *CHAT, SAID]}], {"sessions": 1}, [5, 5]),
    "rows of one session": ([{"messages": CHAT, "session": 1}] * 2, {}, [5, 5]),
    "a prompt among them": ([{"messages": CHAT}, {"prompt": "a"}], {}, None),
    "prompts of random words before them": ([{"messages": CHAT}], {"warmup": 2}, None),
}


@pytest.mark.parametrize(("rows", "options", "n_output"), ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("name", ["openai-chat", "openai"])
def test_chats_need_no_tokenizer_at_a_server_that_counts_them(
    rows: list[dict[str, object]],
    options: dict[str, Any],
    n_output: list[int] | None,
    name: str,
    tmp_path: Path,
) -> None:
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    data = DataSource(str(tmp_path / "rows.jsonl"))
    chats, told = load_of(LoadSpec(data=data, output_tokens="5", **options)), list[str]()
    engine = ENGINES[name]
    with counting(None) as site:
        site = replace(site, engine=engine, capabilities=engine.capabilities)
        if n_output is None or name == "openai":
            with pytest.raises(WorkloadError, match="pass --tokenizer DIR"):
                plan_for(chats, site, None, told.append)
            return
        plan, _ = plan_for(chats, site, None, told.append)
    assert sorted(request.n_output_tok for request in plan.requests) == n_output
    assert {request.n_prompt_tok for request in plan.requests} == {0}
    assert all(json.loads(request.messages or "")[0]["role"] == "user" for request in plan.requests)
    assert [words for words in told if words.startswith("No tokenizer is known")]


@pytest.mark.parametrize("place", ["identity", "target"])
def test_a_model_that_is_named_by_its_folder_is_tokenized_there(folder: Path, place: str) -> None:
    """R34: mlx-lm lists its model so; the Hub has no such name."""
    with counting(len) as site:
        own = replace(
            site, identity=replace(site.identity, model=None), target=replace(site.target, model="m")
        )
        if place == "identity":
            own = replace(own, identity=replace(own.identity, model=str(folder)))
        else:
            own = replace(own, target=replace(own.target, model=str(folder)))
        assert plan_for_server.tokenizer_for(None, None, own).get_vocab_size() > 0
