"""Monitoring: events and metrics read, and verdicts that follow from the cost model."""

from __future__ import annotations

import http.server
import json
import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from draftsmith import UserError
from draftsmith.cli import app
from draftsmith.eval.cost_model import Condition, CostModel
from draftsmith.eval.monitor import Event, difference, event_of_metrics, events_of, judge, judge_gauge, read_costs, windows
from typer.testing import CliRunner

# Drafting 4 tokens takes 2 ms, verification 5 ms, a plain step 4 ms: break-even tau 7.5 / 4 = 1.875 with half a millisecond besides.
COSTS = CostModel((Condition(batch=1, context=100, t_ar=4.0, verify=((1, 4.0), (5, 5.0), (64, 5.0)), fixed=0.5, level=0.5),))

VLLM = """# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 1000.0
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 4000.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 1500.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 700.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} 450.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="2"} 250.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="3"} 100.0
vllm:spec_decode_num_accepted_tokens_created{engine="0"} 1.7e9
"""


def test_vllm_s_counters_are_read_with_the_spread_that_they_tell() -> None:
    event, gauge = event_of_metrics(VLLM)
    assert gauge is None and event == Event(1500, 4000, 1000, lengths=(300, 250, 200, 150, 100))
    found = judge([event], COSTS)
    variance = sum(n * (i - 1.5) ** 2 for i, n in enumerate(event.lengths)) / 1000
    assert found.tau == 2.5 and found.break_even == pytest.approx(1.875) and found.speedup == pytest.approx(2.5 / 1.875)
    assert found.tau_ci == pytest.approx((2.5 - 1.96 * (variance / 1000) ** 0.5, 2.5 + 1.96 * (variance / 1000) ** 0.5), abs=1e-4)
    assert not found.stopped and "speculation pays" in str(found)
    later = Event(1500 + 600, 4000 + 4000, 2000, lengths=(700, 650, 400, 150, 100))
    assert difference(later, event) == Event(600, 4000, 1000, lengths=(400, 400, 200, 0, 0)) and difference(event, later) is None
    now = judge([difference(later, event) or event], COSTS)
    assert now.tau == 1.6 and now.stopped and "STOPPED PAYING" in str(now)


def test_sglang_s_gauge_is_judged_without_an_interval() -> None:
    event, gauge = event_of_metrics('sglang:spec_accept_length{model="m"} 1.5\nsglang:gen_throughput{model="m"} 900')
    assert event is None and gauge == 1.5 and judge_gauge(1.5, 4, COSTS).stopped and not judge_gauge(2.5, 4, COSTS).stopped
    with pytest.raises(UserError, match="is speculation on"):
        event_of_metrics("vllm:num_requests_running 3\n")


def test_the_text_format_s_odd_corners() -> None:
    """Braces and escaped quotes in labels, a gauge that was never set, comments, time stamps."""
    text = """# HELP vllm:spec_decode_num_drafts how many {there} were
vllm:spec_decode_num_drafts_total{model_name="a}b \\"c\\" {d}",engine="0"} 10 1700000000
vllm:spec_decode_num_drafts_total{engine="1"} 20
vllm:spec_decode_num_draft_tokens_total{model_name="a}b"} 60
vllm:spec_decode_num_accepted_tokens_total 30
sglang:spec_accept_length NaN
"""
    assert event_of_metrics(text) == (Event(30, 60, 30), None)
    with pytest.raises(UserError, match="is speculation on"):
        event_of_metrics("sglang:spec_accept_length NaN\n")


def test_it_is_the_cost_that_decides_not_a_fixed_acceptance() -> None:
    """The same 30 % of draft tokens pays where drafting is cheap, and not where it is dear, nor at a batch where verification is."""
    dear = CostModel((Condition(batch=1, context=100, t_ar=4.0, verify=((1, 4.0), (64, 5.0)), fixed=0.5, level=2.0),))
    loaded = CostModel((*COSTS.conditions, Condition(batch=16, context=100, t_ar=6.0, verify=((1, 6.0), (5, 25.0)), fixed=0.5, level=0.5)))
    events = [Event(1.2, 4, 1)] * 400
    assert not judge(events, COSTS).stopped and judge(events, dear).stopped and not judge(events, loaded).stopped
    assert judge([Event(1.2, 4, 1, batch=16)] * 400, loaded).stopped


def test_too_few_events_are_not_certain() -> None:
    generator = random.Random(0)
    few = [Event(generator.choice([0, 0, 1, 3]), 4, 1) for _ in range(24)]
    found = judge(few, COSTS)
    assert not found.stopped and found.tau_ci is not None and found.tau_ci[0] < found.break_even < found.tau_ci[1] and "not certain" in str(found)


def test_windows_hold_whole_events() -> None:
    groups = list(windows([Event(1, 4, 3)] * 7, 6))
    assert [len(group) for group in groups] == [2, 2, 2, 1]


UNFIT = tuple('{"accepted": 1, "proposed": 4, ' + rest + "}" for rest in ('"context": "long"', '"rounds": Infinity', '"batch": NaN', '"context": -1'))


def test_lines_that_are_none_are_named() -> None:
    good = '{"accepted": 2, "proposed": 4}'
    assert list(events_of([good, "", good], "f")) == [Event(2, 4, 1)] * 2
    for bad in ("{", "[]", '{"accepted": 5, "proposed": 4}', '{"accepted": 1}', '{"accepted": 1, "proposed": 4, "rounds": 0}', *UNFIT):
        with pytest.raises(UserError, match="f:2: wanted"):
            list(events_of([good, bad], "f"))


@pytest.fixture
def costs(tmp_path: Path) -> Path:
    (tmp_path / "tuning.json").write_text(json.dumps({"costs": COSTS.to_json()}))
    return tmp_path


def test_costs_come_from_where_they_were_measured(costs: Path, tmp_path: Path) -> None:
    assert read_costs(costs) == read_costs(costs / "tuning.json") == COSTS
    (tmp_path / "report.json").write_text(json.dumps({"costs": {"conditions": COSTS.to_json()}}))
    assert read_costs(tmp_path / "report.json") == COSTS
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="--costs: wanted a tuning"):
        read_costs(tmp_path / "empty")


@pytest.fixture
def server() -> Iterator[str]:
    class Metrics(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(VLLM.encode())

        def log_message(self, format: str, *args: object) -> None:
            pass

    made = http.server.HTTPServer(("127.0.0.1", 0), Metrics)
    thread = threading.Thread(target=made.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{made.server_port}/metrics"
    made.shutdown()
    made.server_close()
    thread.join()


def test_the_command(costs: Path, tmp_path: Path, server: str) -> None:
    def run(source: str) -> tuple[int, str]:
        done = CliRunner().invoke(app, ["monitor", source, "--costs", str(costs), "--window", "50"])
        return done.exit_code, done.output or str(done.exception)

    code, said = run(server)
    assert code == 0 and "1000 rounds: tau 2.500" in said
    events = tmp_path / "events.jsonl"
    fine, poor = ({"accepted": n, "proposed": 4} for n in (3, 0))
    events.write_text("\n".join(json.dumps(e) for e in [fine] * 50 + [poor] * 50))
    code, said = run(str(events))
    assert code == 1 and said.count("rounds:") == 2 and "speculation pays" in said.splitlines()[0] and "STOPPED" in said.splitlines()[1]
    metrics = tmp_path / "metrics.txt"
    metrics.write_text(VLLM)
    assert run(str(metrics))[0] == 0
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    assert "wanted a text file in UTF-8" in run(str(tmp_path / "binary"))[1]
    assert "does not exist" in run(str(tmp_path / "none"))[1] and "wanted a server's metrics" in run("http://127.0.0.1:9/x")[1]
