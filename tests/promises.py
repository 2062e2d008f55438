"""What README promises, beside what proves it: `make promises` runs the proofs and prints one table.

With a folder it reads what earlier test runs left there (`*.xml` of pytest): that is how CI calls it.
`tests/test_promises.py` holds the phrases to README's text.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
MAKE_RUN = "make run"
GPU, TGI, DAEMON = "needs a GPU", "needs TGI", "needs a Docker daemon"

LIVE = "tests/servers/test_engines_live.py::"
ANSWERS = LIVE + "test_an_engine_answers_with_exactly_the_tokens_asked_for[@{}]"
ATTACH = LIVE + "test_a_burst_at_a_url_alone_gets_every_reply_whole_and_does_not_hurt_the_server[@{}]"
FIVE = (
    "tests/burstline/test_suite_live.py::"
    "test_five_real_engines_with_equal_settings_make_one_page_and_leave_nothing_running"
)
TRANSFORMERS = (
    "tests/servers/test_transformers_live.py::"
    "test_a_whole_run_sends_text_of_exactly_the_planned_tokens[@transformers]"
)
GEMMS = (
    "tests/burstline/test_profile_live.py::"
    "test_each_product_of_a_real_engine_against_the_calibrated_cpu[tiny-@vllm]"
)
OFFLINE = "tests/browser/test_report.py::test_the_page_is_quiet_offline_whole_and_fits"
HEADLINE = "tests/oracle/test_oracle.py::test_the_page_says_what_the_servers_did"
EXAMPLES = "tests/test_documentation.py::test_the_outputs_of_readme_are_todays"
CANARY = "tests/loadgen/test_canary.py::"


@dataclass(frozen=True, slots=True)
class Promise:
    """A phrase of README, and what proves it: tests by their ids, MAKE_RUN, or what is missing here.

    `lacking` is what a machine may lack on which its tests do not run, and which breaks no promise.
    """

    phrase: str
    proofs: tuple[str, ...]
    lacking: str = ""


def row(phrase: str, *proofs: str, lacking: str = "") -> Promise:
    return Promise(phrase, proofs, lacking)


FIRST_SCREEN = (
    row("Burstline benchmarks LLM inference servers.", MAKE_RUN),
    row("One command starts an engine", FIVE),
    row("(vLLM,", FIVE, ANSWERS.format("vllm")),
    row("SGLang,", FIVE, ANSWERS.format("sglang")),
    row("TensorRT-LLM,", GPU),
    row("llama.cpp,", FIVE, ANSWERS.format("llamacpp")),
    row("LightLLM,", GPU),
    row("`transformers serve`,", FIVE, TRANSFORMERS),
    row("TGI,", TGI),
    row("or any OpenAI-compatible URL),", *map(ATTACH.format, ("vllm", "sglang", "llamacpp"))),
    row("sends a load, checks every reply,", MAKE_RUN, HEADLINE),
    row("stops the engine,", FIVE),
    row("and writes one HTML report that works offline.", MAKE_RUN, OFFLINE),
    row(
        "*The report of `make run`: the verdict, four answers, and pictures of where the time goes.*",
        MAKE_RUN,
        OFFLINE,
    ),
    row(
        "Three things set it apart: - **It measures its own error.** Each metric has a bound on the client's "
        "error.",
        "tests/loadgen/test_bounds.py::test_the_bound_holds_and_is_small",
    ),
    row(
        "During the run, a stream of events with known times checks this bound.",
        CANARY + "test_the_wire_reads_a_truth_process_beside_its_load",
    ),
    row(
        "The kernel timestamps arrivals.",
        "tests/loadgen/test_reader.py::test_stamps_are_taken_between_the_sending_and_the_return",
    ),
    row(
        "If late reads make the p50 or p99 of TTFT, TPOT or E2E unreliable, or a percentile with an SLO, "
        "the verdict is CLIENT-BOUND.",
        CANARY + "test_an_instrument_that_the_canary_contradicts_is_client_bound",
    ),
    row(
        "- **It compares only equal work.** Runs that differ in tokens, sampling, precision or cache hits "
        "are NOT-COMPARABLE.",
        "tests/measure/test_comparable.py::test_each_difference_is_a_reason_in_its_own_words",
    ),
    row(
        "A failed request counts as infinitely late.",
        "tests/measure/test_metrics.py::test_no_token_is_a_failure_and_infinitely_late",
    ),
    row(
        "A percentile with too few samples is left out.",
        "tests/measure/test_stats.py::test_ranks_and_bounds_of_independent_samples_cover_what_they_promise_over_2000_runs",
    ),
    row(
        "- **It explains the speed.** A roofline model shows which matrix products limit prefill and decode "
        "on the device,",
        "tests/burstline/test_bound.py::test_it_says_which_op_bounds_each_phase_and_how_many_requests_fit",
        GEMMS,
    ),
    row(
        "and how close the engine comes to that limit.",
        "tests/reports/test_roofline_section.py::test_every_phase_has_its_roofline_its_bounds_and_the_gap_is_shown",
        GEMMS,
    ),
    row(
        "## Try it You need Linux, git, make and Python 3.11 or newer (on Debian "
        "and Ubuntu with `python3-venv`), but no GPU. `make run` needs 1,064 "
        "open files: where fewer are allowed (`ulimit -Hn`), it names the largest burst that works. Only "
        "Python packages are downloaded:",
        MAKE_RUN,
        "tests/test_install_scripts.py::test_without_python3_venv_one_line_says_what_to_install_and_nothing_is_left",
        "tests/loadgen/test_drive.py::test_too_few_file_descriptors_are_refused_with_the_fix",
    ),
    row(
        "```sh make run # 1000 requests of 512 -> 64 tokens to the embedded engine; writes a report (1 to 2 "
        "minutes on 2 cores)",
        MAKE_RUN,
    ),
    row(
        "make test # the quick test suite ```", "tests/test_promises.py::test_readme_is_made_of_the_promises"
    ),
    row(
        "Both commands create a virtual environment in `.venv`. To use the `burstline` command, activate it "
        "(`. .venv/bin/activate`).",
        MAKE_RUN,
    ),
    row(
        "The embedded engine is a small but real inference engine: a Llama decoder on numpy",
        "tests/servers/reference/test_transformers.py::test_a_whole_prompt_gives_transformers_logits",
    ),
    row(
        "with continuous batching and a paged KV cache.",
        "tests/servers/reference/test_transformers.py::"
        "test_decode_batched_with_a_prefill_gives_transformers_logits",
        "tests/servers/reference/test_scheduler.py::test_blocks_are_conserved_until_every_sequence_has_ended",
    ),
)
"""Together they are README's text up to its examples, without the picture."""

COMMANDS = (
    row(
        "send a workload to an engine, or run a suite, and write the report",
        MAKE_RUN,
        FIVE,
        "tests/burstline/test_suite.py::test_the_papers_suite_asks_all_three_engines_for_the_papers_burst",
    ),
    row(
        "compare runs, if they did the same work",
        "tests/burstline/test_compare_live.py::"
        "test_a_setting_is_ranked_recognised_and_refused_beside_a_hidden_second_difference",
    ),
    row(
        "run two servers or versions in turn until the faster one is known; find a slower run in a series",
        "tests/burstline/test_gate.py::test_a_slower_candidate_fails_the_gate_and_every_file_says_so",
        "tests/burstline/test_gate.py::test_a_history_names_its_first_bad_run_and_draws_the_series",
    ),
    row(
        "find the highest load within the SLOs, as an interval with a stated error",
        "tests/burstline/test_limit_live.py::test_a_search_keeps_every_probe_as_a_run_and_writes_a_page",
    ),
    row(
        "measure the error of a load generator, Burstline or another (`--client`), at a server of known "
        "truth",
        "tests/burstline/test_certify.py::test_burstline_itself_is_within_its_tolerance_of_the_truth",
        "tests/burstline/test_certify.py::test_a_client_that_adds_20_ms_is_caught",
    ),
    row(
        "regenerate a run's report; print it (`--format text`), or convert it for other tools (`--to DIR`)",
        "tests/reports/test_exports.py::test_all_formats_are_written_where_they_were_asked",
    ),
    row(
        "check that a run's numbers follow from its raw captures",
        "tests/faults/test_folders.py::test_verify_says_that_all_follows_from_the_captures",
    ),
    row(
        "start an engine and print its URL",
        "tests/burstline/test_serve.py::"
        "test_it_prints_the_url_of_an_engine_that_answers_and_an_interrupt_stops_the_engine",
    ),
    row(
        "list the engines that are installed or running, and how to install the others",
        "tests/burstline/test_engines.py::test_every_engine_is_listed_with_how_to_get_those_that_are_not_here",
        "tests/burstline/test_engines.py::test_an_engine_that_answers_is_found_by_its_own_words",
    ),
    row(
        "generate a model folder with random weights, so that nothing is downloaded",
        "tests/burstline/test_make_model.py::test_the_embedded_engine_serves_the_made_weights",
    ),
    row(
        "predict speed and bottleneck of a model on a device; compare devices; predict a training step",
        f"{EXAMPLES}[bound]",
        "tests/roofline/test_training.py::test_the_study_prints_time_bounds_memory_and_other_methods",
    ),
    row(
        "measure this machine for the roofline, or list what was kept (`make accuracy`, in a clone, checks "
        "the model against measured data)",
        "tests/roofline/test_calibrate.py::test_this_machine_is_measured_in_a_process_of_its_own",
        "tests/burstline/test_calibration.py::test_a_damaged_or_foreign_calibration_is_none_and_is_measured_again",
        "tests/roofline/test_accuracy.py",
    ),
)
"""One for each row of README's table of commands: what it does."""

ELSEWHERE = (
    row(
        "use containers",
        "tests/test_containers_live.py::test_the_documented_line_returns_the_runs_code_and_stops_the_server",
        lacking=DAEMON,
    ),
    row(
        "`telemetry.parquet` | memory, CPU, GPU and the engine's own gauges over time",
        FIVE,
        "tests/measure/test_summary.py::"
        "test_memory_peaks_come_from_the_time_of_the_load_and_each_kind_stays_apart",
    ),
    row(
        "with `--audit`: the replies to audited requests, sent alone, and what another client read of them",
        "tests/burstline/test_audit_live.py::test_a_real_engines_replies_are_those_that_it_gives_alone[@vllm]",
        "tests/burstline/test_audit.py::test_a_planted_misreading_is_found",
    ),
)
"""Of the rest of README, what is as large."""

ALL = (*FIRST_SCREEN, *COMMANDS, *ELSEWHERE)
Outcomes = Mapping[str, str]
"""By the id of a test how it ended: "green", "failed", or why it was skipped or left undecided."""


def outcomes_in(folder: Path) -> dict[str, str]:
    """Of every test that ran, from pytest's XML; the last attempt of a test that was repeated counts."""
    ended: dict[str, str] = {}
    for report in sorted(folder.glob("*.xml")):
        for case in ElementTree.parse(report).iter("testcase"):
            path = case.get("classname", "").replace(".", "/")
            outcome, skipped = "green", case.find("skipped")
            if case.find("failure") is not None or case.find("error") is not None:
                outcome = "failed"
            elif skipped is not None:
                outcome = (skipped.get("message") or "skipped").splitlines()[0]
            ended[f"{path}.py::{case.get('name')}"] = outcome
    return ended


def outcome_of(proof: str, ended: Outcomes, runs: Path) -> str:
    """How one proof ended; of several tests the worst."""
    if proof in (GPU, TGI):
        return proof
    if proof == MAKE_RUN:
        return burst_in(runs)
    more = (f"{proof}[", f"{proof}::")  # cases of one test, tests of one file
    of = [outcome for test, outcome in ended.items() if test == proof or test.startswith(more)]
    worst = sorted(of or ["did not run"], key=lambda outcome: (outcome == "green", outcome != "failed"))
    return worst[0]


def burst_in(runs: Path) -> str:
    """Whether the newest run of the embedded engine is README's burst: all replies whole, page, memory."""
    folders = sorted(runs.glob("*-reference-*1000x512*/"))
    if not folders:
        return "did not run"
    summary = json.loads((folders[-1] / "summary.json").read_text("utf-8"))
    is_whole = summary["counts"] == summary["counts"] | {"planned": 1000, "ok": 1000}
    has_memory = summary["memory"]["server_peak_bytes"].get("point", 0) > 0
    has_page = (folders[-1] / "report.html").stat().st_size > 0
    return "green" if is_whole and has_memory and has_page else "failed"


def table(ended: Outcomes, runs: Path) -> Iterator[tuple[str, str, str]]:
    """Phrase, proof and outcome, one row a proof."""
    for promise in ALL:
        for k, proof in enumerate(promise.proofs):
            outcome = outcome_of(proof, ended, runs)
            if promise.lacking and outcome not in ("green", "failed"):
                outcome = promise.lacking
            yield promise.phrase if k == 0 else "", proof, outcome


def is_kept(outcome: str) -> bool:
    """Green, not to be had here, or undecided: a busy machine breaks no promise."""
    return outcome in ("green", GPU, TGI, DAEMON) or outcome.startswith("undecided")


def run_all(folder: Path) -> None:
    """`make run` and every test that is a proof, one after another; pytest's XML goes to the folder."""
    subprocess.run(["make", "run"], cwd=ROOT)
    tests = {proof for promise in ALL for proof in promise.proofs if proof.startswith("tests/")}
    command = [sys.executable, "-m", "pytest", "-q", "-m", "", f"--junitxml={folder}/promises.xml"]
    subprocess.run([*command, *sorted(tests)], cwd=ROOT, env=os.environ | {"HF_HUB_OFFLINE": "1"})


def main(argv: list[str]) -> int:
    with TemporaryDirectory() as temporary:
        folder = Path(argv[0] if argv else temporary)
        if not argv:
            run_all(folder)
        rows = list(table(outcomes_in(folder), ROOT / "runs"))
    for phrase, proof, outcome in rows:
        if phrase:
            print(f"\n{re.sub(r'```(sh)?|[*`]|## ', '', phrase).strip(' -')}")
        command = proof if proof in (MAKE_RUN, GPU, TGI) else f"pytest {proof}"
        print(f"  {outcome:<12}  {'' if proof in (GPU, TGI) else command}".rstrip())
    broken = [proof for _, proof, outcome in rows if not is_kept(outcome)]
    n = sum(outcome == "green" for _, _, outcome in rows)
    print(f"\n{len(ALL)} promises, {len(rows)} proofs: {n} green, {len(broken)} not")
    return int(bool(broken))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
