"""Rows that people wrote become requests; those that cannot are counted, and a silly file names its row."""

import gzip
import json
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer

from burstline.workloads import rows as rows_module
from burstline.workloads.chat import template_of
from burstline.workloads.data_sets import Server, data_requests, read_data
from burstline.workloads.lengths import Lengths
from burstline.workloads.request import RequestKind, WorkloadError
from tests.servers.tiny_model import make_tiny_model

DATA = Path(__file__).parents[1] / "data" / "workloads"
SHORT, LONG = Lengths(7, 7), Lengths(64, 64)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def server(folder) -> Server:
    return Server(tokenizer=Tokenizer.from_file(str(folder / "tokenizer.json")))


@pytest.mark.parametrize(
    ("name", "n", "dropped"),
    [
        ("prompts.jsonl", 40, {"an empty prompt": 1}),
        ("prompts.jsonl.gz", 40, {"an empty prompt": 1}),
        ("sharegpt.json", 30, {"a chat without a user's message": 1}),
        ("chats.jsonl", 13, {}),
        ("prompts.txt", 30, {}),
        ("questions.parquet", 30, {}),
    ],
)
def test_every_format_is_read_and_every_row_accounted_for(name, n, dropped):
    data = read_data(str(DATA / name))
    assert (len(data.items), data.dropped) == (n, dropped)
    assert data.n_rows == n + sum(dropped.values())


def test_a_prompt_is_sent_as_the_ids_that_the_tokenizer_makes_of_it(server):
    data = read_data(str(DATA / "prompts.jsonl"))
    requests, used, dropped = data_requests(data.items, server, None, 0, SHORT)
    assert len(requests) == 40
    assert not dropped
    for request, item in zip(requests, used, strict=True):
        assert list(request.prompt_ids) == server.tokenizer.encode(item.prompt).ids
        assert (request.n_prompt_tok, request.n_output_tok) == (len(request.prompt_ids), item.output_tok)
        assert request.verbatim


def test_an_output_is_as_long_as_the_recorded_reply_else_as_asked(server):
    requests, used, _ = data_requests(read_data(str(DATA / "questions.parquet")).items, server, 5, 0, SHORT)
    replies = [len(server.tokenizer.encode(i.reply, add_special_tokens=False).ids) for i in used]
    assert [request.n_output_tok for request in requests] == replies
    requests, _, _ = data_requests(read_data(str(DATA / "prompts.txt")).items, server, 5, 0, SHORT)
    assert {request.n_output_tok for request in requests} == {7}


def test_what_is_longer_than_the_model_takes_is_counted_and_the_next_row_is_used_instead(server):
    data = read_data(str(DATA / "prompts.jsonl"))
    lengths = sorted(
        r.n_prompt_tok + r.n_output_tok for r in data_requests(data.items, server, None, 0, SHORT)[0]
    )
    small = replace(server, max_tok=lengths[10])
    requests, _, dropped = data_requests(data.items, small, None, 0, LONG)
    assert len(requests) + dropped.total() == 40
    assert [reason for reason in dropped if str(lengths[10]) in reason]
    assert len(data_requests(data.items, small, 5, 0, LONG)[0]) == 5


def test_columns_are_the_users_and_a_sample_is_the_seeds():
    data = read_data(str(DATA / "prompts.jsonl"))
    assert data.sampled(1) == data.sampled(1) != data.sampled(2)
    swapped = read_data(str(DATA / "questions.parquet"), columns=["prompt=answer", "reply=question"])
    assert swapped.items[0].prompt == read_data(str(DATA / "questions.parquet")).items[0].reply


def test_a_chat_is_counted_by_its_own_template_and_images_pass_through(folder, server, tmp_path):
    template = "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}[assistant]"
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": template, "bos_token": "<s>"})
    )
    rendered = template_of(tmp_path)
    assert rendered([{"role": "user", "content": "hi"}]) == "<s>[user] hi\n[assistant]"
    items = read_data(str(DATA / "chats.jsonl")).items
    requests, _, _ = data_requests(items, replace(server, template=rendered), None, 0, LONG)
    text = rendered(items[0].messages)
    assert requests[0].n_prompt_tok == len(server.tokenizer.encode(text, add_special_tokens=False).ids)
    assert requests[-1].n_prompt_tok == 0
    assert json.loads(requests[-1].messages)[0]["content"][1]["image_url"]["url"].startswith("data:image/png")


CALLS = [
    {"role": "user", "content": "Wie wird das Wetter <morgen>? ö"},
    {"role": "assistant", "content": "", "tool_calls": [
        {"type": "function", "function": {"name": "wetter", "arguments": {"ort": "Köln", "tag": 1}}}]},
    {"role": "tool", "content": "Regen"},
]  # fmt: skip
LOOP = "{% for m in messages %}"
DIALECTS = {
    "trained": LOOP + "{% if m.role == 'assistant' %}{%- generation -%} {{ m.content }}!{% endgeneration %}"
    "{% else %}\n{{ m.content }}{% endif %}{% endfor %}",
    "trained, stripped": LOOP + "{%- generation %}\n{{ m.content }}\n{%- endgeneration -%}\n.{% endfor %}",
    "tools": LOOP + "{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson(ensure_ascii=False) }}"
    "{% endfor %}{{ m.content }}{% endfor %}",
    "ascii": LOOP + "{{ m | tojson(ensure_ascii=True) }}{% endfor %}",
    "indented": LOOP + "{{ m | tojson(indent=2) }}{{ m.content | tojson(True) }}{% endfor %}",
    "none": "{{ tools is none }}{{ documents is none }}{{ sep_token is defined }}{{ bos_token is defined }}",
    "loops": LOOP + "{% if loop.index > 2 %}{% break %}{% endif %}{{ m.role }}{% endfor %}",
}


@pytest.mark.slow
@pytest.mark.parametrize("dialect", DIALECTS)
def test_templates_render_as_transformers_renders_them(tmp_path, dialect):
    compiled = pytest.importorskip("transformers.utils.chat_template_utils")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": {"content": "<s>"}}))
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": DIALECTS[dialect]}))
    own = template_of(tmp_path)(CALLS)
    (theirs,), _ = compiled.render_jinja_template(
        [CALLS], chat_template=DIALECTS[dialect], add_generation_prompt=True, bos_token="<s>"
    )
    assert own == theirs


STRICT = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{{ m.content + '\n' }}{% endfor %}"
)


def turns(*roles):
    return {"messages": [{"role": role, "content": "hello there"} for role in roles]}


@pytest.mark.parametrize("speaks_chat", [False, True])
def test_a_chat_that_the_template_refuses_is_left_out_by_its_reason(server, tmp_path, speaks_chat):
    (tmp_path / "chat_template.jinja").write_text(STRICT)
    rows = [turns("user")] * 8 + [turns("assistant", "user"), turns("user", "user")]
    called = {"role": "assistant", "content": None, "tool_calls": [1]}
    rows += [{"messages": [*turns("user")["messages"], called, *turns("user")["messages"]]}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    own = replace(server, template=template_of(tmp_path), speaks_chat=speaks_chat)
    requests, used, dropped = data_requests(
        read_data(str(tmp_path / "rows.jsonl")).items, own, None, 0, SHORT
    )
    assert len(requests) == len(used) == 9
    assert dropped == {"refused by the model's chat template": 2}


def test_a_template_that_is_not_jinja_is_one_line(tmp_path):
    (tmp_path / "chat_template.jinja").write_text("{% for %}")
    with pytest.raises(WorkloadError, match="chat template is not Jinja") as caught:
        template_of(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "chat",
    [
        [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}],
        [{"from": "human", "value": "q"}, {"from": "chatgpt", "value": "a"}],
        [{"from": "user", "value": "q"}, {"from": "bing", "value": "a"}],
        [{"from": "Human", "value": "q"}, {"from": "bard", "value": "a"}],
        [{"role": "user", "content": "q"}, {"role": "model", "content": "a"}],
        [{"content": "q"}, {"content": "a"}],
    ],
)
def test_roles_of_every_collection_are_those_of_openai(tmp_path, chat):
    (tmp_path / "rows.jsonl").write_text(json.dumps({"conversations": chat}))
    (item,) = read_data(str(tmp_path / "rows.jsonl")).items
    assert [message["role"] for message in item.messages] == ["user"]
    assert item.reply == "a"


@pytest.mark.parametrize("system", ["be brief", "", None])
def test_a_system_text_beside_a_conversation_begins_it(tmp_path, system):
    chat = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
    (tmp_path / "rows.jsonl").write_text(json.dumps({"system": system, "conversations": chat}))
    (item,) = read_data(str(tmp_path / "rows.jsonl")).items
    begin = [{"role": "system", "content": system}] if system else []
    assert list(item.messages) == [*begin, {"role": "user", "content": "q"}]


def test_a_model_without_a_chat_template_gets_plain_text_but_pictures_stay_a_chat(server):
    requests, _, _ = data_requests(read_data(str(DATA / "chats.jsonl")).items, server, None, 0, SHORT)
    assert all(request.messages is None for request in requests[:-1])
    assert requests[-1].messages is not None


def test_rerank_rows_have_a_query_and_documents(server):
    items = read_data(str(DATA / "rerank.jsonl")).items
    requests, _, _ = data_requests(items, server, None, 0, LONG, RequestKind.RERANK)
    assert len(requests[0].documents) == 4
    assert requests[0].n_output_tok == 1


@pytest.mark.slow
def test_a_data_set_of_the_library_is_read_by_the_library(tmp_path):
    datasets = pytest.importorskip("datasets")
    one = datasets.Dataset.from_dict({"text": ["one two", "three"], "n": [1, 2]})
    one.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"train": one, "test": one}).save_to_disk(str(tmp_path / "two"))
    assert [item.prompt for item in read_data(str(tmp_path / "one")).items] == ["one two", "three"]
    assert len(read_data(str(tmp_path / "two"), split="test").items) == 2
    with pytest.raises(WorkloadError, match="splits train, test"):
        read_data(str(tmp_path / "two"))


GOOD = b'{"prompt": "a b"}\n'
SILLY = {
    "no such file": ("x.jsonl", None, "no such file"),
    "empty": ("x.jsonl", b"", "row 1: the file is empty"),
    "wrong column": ("x.jsonl", GOOD.replace(b"prompt", b"ask"), "row 1 has no column 'prompt'; it has ask"),
    "column missing later": ("x.jsonl", GOOD + b'{"ask": "c"}\n', "row 2 has no column 'prompt'"),
    "binary": ("x.jsonl", GOOD + bytes(range(256)), "row 2.*binary"),
    "huge line": ("x.jsonl", GOOD + b'{"prompt": "' + b"x" * 5000 + b'"}\n', "row 2 is longer than"),
    "UTF-16 BOM": ("x.jsonl", '{"prompt": "a"}\n'.encode("utf-16"), "row 1: the text is UTF-16"),
    "NaN length": ("x.jsonl", GOOD + b'{"prompt": "a", "output_tokens": NaN}\n', "row 2 is not JSON.*no NaN"),
    "length in words": (
        "x.jsonl",
        b'{"prompt": "a", "output_tokens": "many"}\n',
        "row 1: output_tokens is 'many'",
    ),
    "negative time": ("x.jsonl", GOOD + b'{"prompt": "a", "timestamp": -1}\n', "row 2: timestamp is -1"),
    "prompt is a number": ("x.jsonl", b'{"prompt": 5}\n', "row 1: the prompt is of type int"),
    "length beyond reason": (
        "x.jsonl",
        b'{"prompt": "a", "output_tokens": 1e30}\n',
        "output_tokens is 1e[+]30; expected a whole",
    ),
    "documents are a number": ("x.jsonl", b'{"prompt": "a", "documents": 5}\n', "documents: expected a list"),
    "content is a number": (
        "x.jsonl",
        b'{"messages": [{"role": "user", "content": 3}]}\n',
        "message's content is 3; expected text",
    ),
    "blank lines alone": ("x.jsonl", b"\n\n", "none of the rows can be used: there are none"),
    "a header alone": ("x.csv", b"prompt\n", "none of the rows can be used: there are none"),
    "not an object": ("x.jsonl", GOOD + b"[1]\n", "row 2 is of type list"),
    "half a line": ("x.jsonl", GOOD + b'{"prompt": "a', "row 2 is not JSON"),
    "truncated gzip": (
        "x.jsonl.gz",
        gzip.compress(GOOD * 3000)[:-20],
        r"row \d{2,}: the compressed file ends",
    ),
    "a gzip of nothing but one row": (
        "x.jsonl.gz",
        gzip.compress(GOOD * 1_000_000),
        "unpacks to over 50 times",
    ),
    "a list that is no text": ("x.json", b'[{"prompt": "\xff"}]', "row 1: cannot be read: .*decode byte"),
    "a deep list": ("x.json", b'[{"prompt": "a"}, ' + b"[" * 9000, "row 2 is not JSON"),
    "a long number": (
        "x.jsonl",
        b'{"prompt": "a", "timestamp": "' + b"9" * 999 + b'"}\n',
        r"is '9{59}; expected",
    ),
    "damaged gzip": ("x.jsonl.gz", gzip.compress(GOOD)[:10] + b"\xff" * 300, "row 1: cannot be decompressed"),
    "half a list": ("x.json", b'[{"prompt": "a"},\n{"prompt"', "row 2.*not JSON"),
    "half a Parquet file": ("x.parquet", "cut", "row 1 cannot be read as Parquet"),
    "an unknown format": ("x.xlsx", b"PK..", "format '.xlsx'"),
    "nothing but blanks": (
        "x.jsonl",
        b'{"prompt": " "}\n',
        "can be used: 1 an empty prompt",
    ),
}


@pytest.mark.parametrize("name", SILLY)
def test_a_silly_file_is_refused_in_one_line_that_names_the_row(name, tmp_path, monkeypatch):
    monkeypatch.setattr(rows_module, "MAX_LINE", 4096)
    file_name, content, words = SILLY[name]
    file = tmp_path / file_name
    if content == "cut":
        pq.write_table(pa.table({"prompt": ["a"] * 100}), file)
        content = file.read_bytes()[:200]
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(WorkloadError, match=words) as caught:
        read_data(str(file))
    assert "\n" not in str(caught.value)


def test_a_list_is_read_row_by_row_wherever_its_parts_end(tmp_path, monkeypatch):
    rows = [{"prompt": f"é \u2028 {k}" + "x" * k, "n": [{"a": 1}, []]} for k in range(40)]
    file = tmp_path / "x.json"
    file.write_text("\ufeff [\r\n" + ",\n  ".join(map(json.dumps, rows)) + "\n]\n", "utf-8")
    for piece in (1, 7, 64, 1 << 16):
        monkeypatch.setattr(rows_module, "_PIECE", piece)
        assert list(rows_module.read_rows(str(file), "--data")) == list(enumerate(rows, 1))


def test_a_utf8_bom_is_no_part_of_the_first_row(tmp_path):
    (tmp_path / "x.jsonl").write_bytes(b"\xef\xbb\xbf" + GOOD)
    assert read_data(str(tmp_path / "x.jsonl")).items[0].prompt == "a b"


def test_a_call_of_a_tool_has_no_content_and_its_chat_stays_a_chat(server, tmp_path):
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "b"},
    ]
    (tmp_path / "x.jsonl").write_text(json.dumps({"messages": messages}) + "\n")
    (item,) = read_data(str(tmp_path / "x.jsonl")).items
    ((request,), _, _) = data_requests([item], server, None, 0, SHORT)
    assert json.loads(request.messages) == messages


def test_a_chat_endpoint_gets_the_messages_and_not_one_text_of_them(server, tmp_path):
    rows = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    (tmp_path / "x.jsonl").write_text(json.dumps({"messages": rows}) + "\n")
    items = read_data(str(tmp_path / "x.jsonl")).items
    ((chat,), _, _) = data_requests(items, replace(server, speaks_chat=True), None, 0, SHORT)
    assert (json.loads(chat.messages), chat.prompt_ids, chat.prompt_text) == (rows, None, None)
    ((plain,), _, _) = data_requests(items, server, None, 0, SHORT)
    assert plain.messages is None


def test_a_seed_chooses_whole_sessions(tmp_path):
    rows = [{"prompt": f"{s} {k}", "session": s} for s in range(20) for k in range(3)]
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = read_data(str(tmp_path / "x.jsonl"))
    one, other = (data.sampled(seed) for seed in (1, 2))
    assert one != other
    assert [item.session for item in one[::3]] == [item.session for item in one[2::3]]
    assert [item.row for item in one[:3]] == sorted(item.row for item in one[:3])


def test_a_csv_is_read_without_threads_that_outlive_it(tmp_path):
    """One that reads ahead when the command ends aborts it."""
    (tmp_path / "x.csv").write_text("prompt\n" + "a\n" * 100_000)
    before = set(Path("/proc/self/task").iterdir())
    number, row = next(rows_module.read_rows(str(tmp_path / "x.csv"), "--data"))
    assert (number, row, set(Path("/proc/self/task").iterdir())) == (2, {"prompt": "a"}, before)


def test_a_csv_may_have_line_breaks_and_commas_in_quotes(tmp_path):
    (tmp_path / "x.csv").write_bytes(b'\xef\xbb\xbfprompt,n\r\n"a, \n\n ""b""",1\r\n\r\n,2')
    read = list(rows_module.read_rows(str(tmp_path / "x.csv"), "--data"))
    assert read == [(2, {"prompt": 'a, \n\n "b"', "n": "1"}), (3, {"prompt": None, "n": "2"})]
