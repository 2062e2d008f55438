import orjson
import pytest

from burstline.workloads.request import WorkloadError
from tests.truth.script import Script, script_from, script_from_header, scripts_from_json


def test_a_single_number_may_stand_for_a_list():
    assert script_from({"gaps_s": 0.5, "tok_per_event": 4}) == Script(gaps_s=(0.5,), tok_per_event=(4,))


def test_a_file_holds_one_script_or_a_list_in_the_order_of_arrival():
    assert scripts_from_json(b'{"ttft_s": 1}') == (Script(ttft_s=1),)
    assert scripts_from_json(b'[{"ttft_s": 1}, {}]') == (Script(ttft_s=1), Script())


def test_a_request_lays_its_own_script_over_the_servers():
    assert script_from_header(b'{"n_tok": 3}', Script(ttft_s=1)) == Script(ttft_s=1, n_tok=3)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"ttft": 1}, "no field 'ttft'; there are headers_s, ttft_s"),
        ({"usage": "some"}, "usage 'some': expected one of final, last"),
        ({"fault": "explode"}, "fault 'explode': expected one of error, stall"),
        ({"gaps_s": [-0.1]}, "a time is negative"),
        ({"headers_s": 0.3}, "headers_s 0.3, ttft_s 0.2: expected to ascend"),
        ({"role_s": 0.3}, "expected to ascend"),
        ({"gaps_s": []}, "at least one value"),
        ({"tok_per_event": [0]}, "at least 1 token"),
        ({"status": 99}, "status 99"),
        ({"n_tok": -1}, "n_tok -1"),
        ({"events_per_write": 0}, "events_per_write: expected at least 1"),
        ({"ttft_s": "soon"}, "wrong type"),
    ],
)
def test_a_wrong_script_is_told_what_was_expected(given, message):
    with pytest.raises(WorkloadError) as raised:
        scripts_from_json(orjson.dumps(given))
    assert message in str(raised.value)


@pytest.mark.parametrize("text", [b"", b"{", b"3", b"[]", b"[3]"])
def test_what_is_no_script_is_refused(text):
    with pytest.raises(WorkloadError, match="script: "):
        scripts_from_json(text)
