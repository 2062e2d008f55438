"""Speculative decoding as engines count it; the names are those of their sources."""

import pytest

from burstline.servers.registry import ENGINES

COUNTED = {
    "vllm": """vllm:spec_decode_num_drafts_total{engine="0"} 40.0
vllm:spec_decode_num_draft_tokens_total{engine="0"} 120.0
vllm:spec_decode_num_accepted_tokens_total{engine="0"} 60.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 30.0
""",
    "llamacpp": """llamacpp:spec_decode_num_draft_tokens_total 120
llamacpp:spec_decode_num_accepted_tokens_total 60
llamacpp:spec_decode_num_drafts_total 40
""",
    "sglang": """sglang:generation_tokens_total{is_streaming="True",model_name="m"} 100.0
sglang:spec_verify_calls_total{model_name="m"} 40.0
sglang:spec_accept_length{model_name="m"} 9.0
""",
    "lightllm": """lightllm_request_mtp_avg_token_per_step_sum 50.0
lightllm_request_mtp_avg_token_per_step_count 20.0
""",
    "trtllm": """trtllm_spec_decode_num_draft_tokens_total{model_name="m"} 120.0
trtllm_spec_decode_num_accepted_tokens_total{model_name="m"} 60.0
""",
}
MEANS = {
    "vllm": {"accepted": 1.5, "acceptance": 0.5},
    "llamacpp": {"accepted": 1.5, "acceptance": 0.5},
    "sglang": {"accepted_a_step": 2.5},
    "lightllm": {"accepted_a_step": 2.5},
    "trtllm": {"acceptance": 0.5},
}


@pytest.mark.parametrize("name", COUNTED)
def test_acceptance_is_read_from_an_engines_own_counters(name: str) -> None:
    told = ENGINES[name].gauges(COUNTED[name]).latencies or {}
    means = {
        what: told[f"{what}_sum"] / told[f"{what}_count"]
        for what in ("accepted", "acceptance", "accepted_a_step")
        if f"{what}_count" in told
    }
    assert means == MEANS[name]


def test_an_engine_that_does_not_speculate_has_no_acceptance() -> None:
    assert not ENGINES["sglang"].gauges('sglang:spec_accept_length{model_name="m"} 0.0\n').latencies
