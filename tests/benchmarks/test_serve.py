"""The arithmetic of the comparison of servers: what a report says, what counts, and which of the others is best."""

import json
import random
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from benchmarks.peers.rounds import Results
from benchmarks.peers.servers import read_report
from benchmarks.peers.shapes import BOS, EOS, SHAPES
from benchmarks.peers.words import list_merges, list_words, make_prompt
from benchmarks.peers.write import write_tokenizer
from benchmarks.serve import CELLS, STORED_REPORT, WARM, is_hopeless, make_figures, note_values
from penstock.errors import PenstockError

SHORT = CELLS[0]
LIKE_NOBODY = {"ttft_ms_p99": 1.0, "itl_ms_p99": 1.0, "cpu_s_per_1000_tokens": 1.0, "load_share": 0.05}


def test_a_prompt_of_words_has_the_tokens_that_were_asked_for(tmp_path: Path) -> None:
    words = list_words(32000)
    write_tokenizer(tmp_path, words, list_merges(words))
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == 32000
    assert len(tokenizer.encode(make_prompt(random.Random(1), 300)).ids) == 300
    assert all(tokenizer.decode([number]) for number in range(32000) if number not in {BOS, EOS})
    assert len(set(list_words(SHAPES["q06"].vocabulary))) == SHAPES["q06"].vocabulary


def test_requests_have_the_same_lengths_in_each_round_and_other_words() -> None:
    one, other = CELLS[1].make_requests(0), CELLS[1].make_requests(1)
    assert [(prompt.count(" "), new) for prompt, new in one] == [(prompt.count(" "), new) for prompt, new in other]
    assert not {prompt for prompt, _ in one} & {prompt for prompt, _ in other}
    assert {(prompt.count(" "), new) for prompt, new in SHORT.make_requests(0)} == {(32, 16)}


def test_processor_time_is_that_between_the_first_request_and_the_last_answer() -> None:
    report = json.loads(STORED_REPORT.read_text())
    (load,) = report["benchmarks"]
    load |= {"start_time": 10.0, "end_time": 20.0}
    load["metrics"]["output_token_count"]["total"]["total_sum"] = 500.0
    found = read_report(report, [(0.0, 0.0, 0.0), (10.0, 8.0, 1.0), (15.0, 8.2, 6.0), (30.0, 8.8, 36.0)])
    assert found["tokens_s"] == 50.0
    assert found["load_share"] == pytest.approx((8.4 - 8.0) / 10)
    assert found["cpu_s_per_1000_tokens"] == pytest.approx(2 * (16.0 - 1.0))
    assert "joules_per_1000_tokens" not in found
    told = read_report(report, [(10.0, 8.0, 1.0, 100.0), (20.0, 8.2, 6.0, 350.0)])
    assert told["joules_per_1000_tokens"] == pytest.approx(2 * 250.0)


def test_a_load_with_failed_requests_is_refused() -> None:
    report = json.loads(STORED_REPORT.read_text())
    (load,) = report["benchmarks"]
    load["scheduler_metrics"]["requests_made"]["errored"] = 1
    load["requests"]["errored"] = [{"info": {"error": "no room"}}]
    with pytest.raises(PenstockError, match="no room"):
        read_report(report, [(0.0, 0.0, 0.0)])


def test_the_best_of_the_others_counts_within_a_round() -> None:
    results = Results(SHAPES["q06"])
    # The machine is twice as fast in the second round: no ratio may show that.
    for number, speed in enumerate((1.0, 2.0)):
        for side, rate in (("embedded", 30.0), ("kafka", 20.0), ("vllm", 25.0), ("llama-server", 10.0)):
            values = dict.fromkeys(LIKE_NOBODY, 100 / rate / speed) | {"load_share": 0.05}
            note_values(results, SHORT, side, number, values | {"tokens_s": rate * speed})
    found = make_figures(results)
    assert found["served_tokens_s_vs_best_short_32_q06"] == pytest.approx(30 / 25)
    assert found["served_tokens_s_vs_best_short_32_q06_kafka"] == pytest.approx(20 / 25)
    assert found["served_ttft_p99_vs_best_short_32_q06"] == pytest.approx(25 / 30)
    assert found["cpu_s_per_1000_tokens_vs_best_short_32_q06_kafka"] == pytest.approx(25 / 20)
    assert found["served_tokens_s_short_32_llama_server_q06"] == 15.0


def test_a_run_in_which_the_load_took_too_much_does_not_count() -> None:
    results = Results(SHAPES["small"])
    note_values(results, SHORT, "embedded", 0, LIKE_NOBODY | {"tokens_s": 1.0, "load_share": 0.3})
    note_values(results, CELLS[1], "embedded", 0, LIKE_NOBODY | {"tokens_s": 1.0, "load_share": 0.1})
    note_values(results, WARM, "embedded", 0, LIKE_NOBODY | {"tokens_s": 1.0})
    assert make_figures(results) == {}


def test_one_that_is_far_behind_in_every_load_is_not_asked_again() -> None:
    results = Results(SHAPES["small"])
    rates = {"embedded": (1.0, 1.0), "vllm": (100.0, 100.0), "llama-server": (30.0, 50.0), "transformers": (30.0, 30.0)}
    assert not any(is_hopeless(results, side) for side in rates)
    for side, both in rates.items():
        for cell, rate in zip(CELLS, both, strict=False):
            note_values(results, cell, side, 0, {"tokens_s": rate, "load_share": 0.0})
    assert [side for side in rates if is_hopeless(results, side)] == ["transformers"]
