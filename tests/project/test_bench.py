"""The benchmark's statistics are correct, and the results in the tree are complete and consistent."""

import asyncio
import dataclasses
import json
import re
import socket
from pathlib import Path

import grpc
import pytest

from bench import fault, peers, scale
from bench.figures import Amount, Quantiles, Timing, growth_exponent, quantile, slope
from bench.machine import Machine, describe_machine
from bench.report import SCHEMA, Report, dump, load, render
from bench.targets import LOADED_GRPC, evaluate_targets
from scrubber.config.policy_file import load_policy
from scrubber.domain.health.history import MAX_ENTRIES

BENCH = Path(__file__).parents[2] / "bench"
LATEST = BENCH / "results" / "latest.json"

PROMISED = {
    *("hand-over.same-container", "hand-over.certificate", "growth.devices", "allocate", "fault"),
    *("growth.processes.same-container", "growth.processes.certificate", "idle.cpu", "idle.pss", "storm", "storm.rows"),
    *("command", "command.policy-check", "command.doctor", "scrape", "scrape.crowd", "start.plugin", "rolling-update"),
    *("release.to-scrub", "release.to-clean", "waiting.to-scrub", "take-over", "eraser.clear", "eraser.verify", "xid"),
    *("stop.driver-closed", "taint", "claim-idle.requests"),
}


def timing(name: str, milliseconds: float, reference: float | None = None) -> Timing:
    measured = Quantiles(100, milliseconds / 1000, 2 * milliseconds / 1000, 3 * milliseconds / 1000)
    if reference is None:
        return Timing(name, name, measured)
    return Timing(name, name, measured, Quantiles(100, reference / 1000, 2 * reference / 1000, 1.0), "echo")


def report(*timings: Timing, amounts: tuple[Amount, ...] = ()) -> Report:
    machine = Machine("A processor", 2, 4.0, "Linux 6.1", "CPython 3.11.2", "1.85.1", 0.25)
    targets = evaluate_targets(timings, amounts)
    return Report(SCHEMA, "1.0", "2026-01-02T03:04Z", False, 10.0, "marker", machine, timings, amounts, targets)


# -- quantiles ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("samples", "share", "expected"),
    [
        ([7.0], 0.5, 7.0),
        ([7.0], 0.99, 7.0),
        ([3.0, 1.0, 2.0], 0.5, 2.0),
        ([4.0, 3.0, 2.0, 1.0], 0.5, 2.0),
        ([float(number) for number in range(1, 101)], 0.99, 99.0),
        ([float(number) for number in range(1, 1001)], 0.99, 990.0),
        ([float(number) for number in range(1, 51)], 0.99, 50.0),
        ([1.0, 2.0], 1.0, 2.0),
    ],
)
def test_quantile_is_one_of_the_measured_samples(samples: list[float], share: float, expected: float) -> None:
    assert quantile(samples, share) == expected


@pytest.mark.parametrize(("samples", "share"), [([], 0.5), ([1.0], 0.0), ([1.0], 1.5)])
def test_quantile_of_no_samples_is_an_error(samples: list[float], share: float) -> None:
    with pytest.raises(ValueError, match=r"quantile|share"):
        quantile(samples, share)


def test_p99_of_few_samples_is_the_worst_sample() -> None:
    assert Quantiles.of([0.3, 0.1, 0.2]) == Quantiles(samples=3, p50=0.2, p99=0.3, worst=0.3)


@pytest.mark.parametrize(
    ("seconds", "expected"), [([1.0, 1.0, 1.0], 0.0), ([1.0, 10.0, 100.0], 1.0), ([1.0, 1.0, 100.0], 2.0)]
)
def test_growth_exponent_is_that_of_the_steepest_step(seconds: list[float], expected: float) -> None:
    assert growth_exponent([1, 10, 100], seconds) == pytest.approx(expected)


@pytest.mark.parametrize(("sizes", "seconds"), [([4], [1.0]), ([4, 4], [1.0, 1.0]), ([4, 8], [0.0, 1.0])])
def test_growth_exponent_needs_increasing_sizes(sizes: list[float], seconds: list[float]) -> None:
    with pytest.raises(ValueError, match=r"sizes"):
        growth_exponent(sizes, seconds)


# -- targets -----------------------------------------------------------------------------------------------------------


def test_timing_ratio_is_relative_to_the_reference_of_the_same_run() -> None:
    assert timing("x", 6.0, reference=2.0).ratio_p99 == pytest.approx(3.0)
    assert timing("x", 6.0).ratio_p99 is None


def test_hand_over_target_is_judged_by_the_worst_row() -> None:
    name = "hand-over.same-container"
    targets = evaluate_targets([timing(f"{name}.{row}", 3.0, 1.0) for row in ("pods-1", "pods-16")], ())
    assert [(each.name, each.met) for each in targets] == [(name, True)]
    targets = evaluate_targets([timing(f"{name}.pods-16", 3.0, 1.0), timing(f"{name}.devices-64", 6.0, 1.0)], ())
    assert [(each.name, each.met) for each in targets] == [(name, False)]
    assert targets[0].measured == pytest.approx(6.0)


def test_target_at_its_limit_is_met_and_a_missed_target_has_a_cause() -> None:
    met, missed = (evaluate_targets([timing("fault.devices-16", each)], ())[0] for each in (50.0, 51.0))
    assert met.measured == pytest.approx(met.limit)
    assert (met.met, met.cause) == (True, "")
    assert not missed.met
    assert missed.cause


def test_driver_that_sends_requests_at_rest_misses_its_target() -> None:
    rows = [Amount("claim-idle.requests", "requests", each, "a minute") for each in (0.0, 1.0)]
    idle, busy = (evaluate_targets((), [each])[0] for each in rows)
    assert (idle.name, idle.met, busy.met) == ("claim-idle.requests", True, False)


def test_taint_target_is_judged_by_its_p99() -> None:
    met, missed = (evaluate_targets([timing("taint.devices-16", each)], ())[0] for each in (50.0, 51.0))
    assert (met.name, met.met, missed.met) == ("taint", True, False)


def test_command_target_is_judged_by_the_slowest_command() -> None:
    (target,) = evaluate_targets([timing("command.version", 60.0, 80.0), timing("command.devices", 130.0, 80.0)], ())
    assert (target.name, target.met) == ("command", False)
    assert target.measured == pytest.approx(260.0)


@pytest.mark.parametrize("name", ["command.policy-check", "command.doctor"])
def test_command_that_does_more_than_query_is_judged_separately_by_the_same_limit(name: str) -> None:
    judged, more = evaluate_targets([timing("command.devices", 60.0, 80.0), timing(name, 130.0, 80.0)], ())
    assert (judged.name, judged.met) == ("command", True)
    assert (more.name, more.met, more.unit) == (name, False, "ms")
    assert more.measured == pytest.approx(260.0)
    assert more.limit == judged.limit


def test_growth_target_is_judged_by_all_device_counts() -> None:
    prefix = "hand-over.same-container.devices-"
    (target,) = evaluate_targets([timing(f"{prefix}{size}", size) for size in (256, 4, 64)], ())
    assert target.name == "growth.devices"
    assert "4, 64, 256" in target.sentence
    assert target.measured == pytest.approx(1.0)


def test_scrape_target_is_judged_at_the_largest_device_count() -> None:
    (target,) = evaluate_targets([timing("scrape.devices-256", 21.0, 1.0), timing("scrape.devices-32", 4.0, 1.0)], ())
    assert (target.name, target.met, target.unit) == ("scrape", False, "ms")
    assert target.measured == pytest.approx(21.0)
    assert "256 devices" in target.sentence


def test_scraped_restarts_are_compared_with_unscraped_ones_and_count_for_no_other_target() -> None:
    prefix = "hand-over.same-container.scraped-"
    (target,) = evaluate_targets([timing(f"{prefix}by-none", 10.0, 1.0), timing(f"{prefix}by-a-crowd", 80.0, 2.0)], ())
    assert (target.name, target.met, target.unit) == ("scrape.crowd", False, "times")
    assert target.measured == pytest.approx(4.0)


def test_time_until_the_driver_is_closed_is_judged_by_the_longest_and_shown_as_a_ratio() -> None:
    (closed,) = evaluate_targets([timing("stop.driver-closed", 150.0, 50.0)], ())
    assert (closed.name, closed.met, closed.unit) == ("stop.driver-closed", True, "s")
    assert closed.measured == pytest.approx(0.45)
    assert "3.0 times" in closed.sentence
    (late,) = evaluate_targets([timing("stop.driver-closed", 7000.0, 50.0)], ())
    assert not late.met


@pytest.mark.parametrize(("name", "reference"), [("eraser.clear", "memset"), ("eraser.verify", "memcmp")])
def test_eraser_must_reach_nine_tenths_of_the_speed_of_memory(name: str, reference: str) -> None:
    met, missed = (evaluate_targets([timing(name, each, 90.0)], ())[0] for each in (99.0, 101.0))
    assert (met.met, missed.met) == (True, False)
    assert reference in met.sentence


def test_plugin_start_is_judged_by_its_median_and_a_rolling_update_by_the_longest_gap() -> None:
    start, gap = evaluate_targets([timing("start.plugin", 299.0, 100.0), timing("rolling-update", 17.0)], ())
    assert (start.name, start.met, gap.name, gap.met) == ("start.plugin", True, "rolling-update", False)
    assert start.measured == pytest.approx(299.0)
    assert gap.measured == pytest.approx(51.0)
    assert "3.0 times" in start.sentence


def test_start_of_a_scrub_and_what_a_release_takes_besides_it_are_judged_by_their_p99() -> None:
    rows = (timing("release.to-scrub", 25.0), timing("waiting.to-scrub", 26.0), timing("release.besides-scrub", 50.0))
    targets = {each.name: each for each in evaluate_targets(rows, ())}
    assert {name: (each.met, each.limit) for name, each in targets.items()} == {
        "release.to-scrub": (True, 50.0),
        "waiting.to-scrub": (False, 50.0),
        "release.to-clean": (True, 100.0),
    }
    assert targets["waiting.to-scrub"].measured == pytest.approx(52.0)
    assert "p50: 26 ms" in targets["waiting.to-scrub"].sentence


def test_target_that_was_not_measured_is_not_judged() -> None:
    assert evaluate_targets([], ()) == ()


# -- the report --------------------------------------------------------------------------------------------------------

EXAMPLE = report(
    timing("hand-over.same-container.pods-16", 12.0, 1.5),
    timing("start.service", 1500.0),
    amounts=(Amount("idle.cpu", "CPU of all", 0.5, "% of a core"), Amount("idle.pss", "PSS of all", 151.0, "MB")),
)


def test_benchmark_report_round_trips_through_its_file() -> None:
    assert load(dump(EXAMPLE)) == EXAMPLE


def test_benchmark_file_contains_ratios_and_target_results() -> None:
    document = json.loads(dump(EXAMPLE))
    assert document["timings"][0]["ratio_p99"] == 8.0
    assert document["timings"][1]["ratio_p99"] is None
    assert [each["met"] for each in document["targets"]] == [False, True, False]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda document: document.update(schema=SCHEMA + 1),
        lambda document: document.update(host="node-1"),
        lambda document: document["machine"].pop("cores"),
        lambda document: document["timings"][0]["measured"].update(p50="fast"),
    ],
)
def test_invalid_benchmark_file_is_refused(spoil: object) -> None:
    document = json.loads(dump(EXAMPLE))
    assert callable(spoil)
    spoil(document)
    with pytest.raises(ValueError, match=r"schema|host|cores|p50"):
        load(json.dumps(document))


def test_benchmark_table_shows_references_and_causes_of_missed_targets() -> None:
    table = render(EXAMPLE)
    assert "| hand-over.same-container.pods-16 | 12.00 | 24.00 | echo | 1.50 | 3.00 | 8.0 | 8.0 | 100 |" in table
    assert "| start.service | 1500 | 3000 |  |  |  |  |  | 100 |" in table
    assert "| processor time at rest, 16 devices | 0.5 % of a core | 0.5 % of a core | met |" in table
    assert "| memory at rest (PSS), 16 devices | 150 MB | 151 MB | **missed** |" in table
    for target in EXAMPLE.targets:
        assert (f"- {target.sentence}: {target.cause}" in table) is not target.met


def test_machine_description_does_not_contain_the_hostname() -> None:
    description = " ".join(str(value) for value in dataclasses.asdict(describe_machine()).values())
    assert re.search(r"\d", description)
    assert socket.gethostname() not in description.split()


# -- the results in the tree -------------------------------------------------------------------------------------------


def test_recorded_benchmark_results_are_complete() -> None:
    latest = load(LATEST.read_text())
    assert not latest.quick
    assert {each.name for each in latest.targets} >= PROMISED
    names = [*(each.name for each in latest.timings), *(each.name for each in latest.amounts)]
    assert len(set(names)) == len(names)
    for figure in latest.timings:
        for quantiles in (figure.measured, figure.reference):
            assert quantiles is None or 0 < quantiles.p50 <= quantiles.p99 <= quantiles.worst


def test_recorded_benchmark_table_matches_the_recorded_figures() -> None:
    assert (BENCH / "RESULTS.md").read_text() == render(load(LATEST.read_text()))


def test_a_recorded_target_has_a_cause_if_and_only_if_it_was_missed() -> None:
    assert all(bool(each.cause) is not each.met for each in load(LATEST.read_text()).targets)


@pytest.mark.parametrize("name", ["RESULTS.md", "README.md", "results/latest.json", "results/pod-start.json"])
def test_recorded_results_contain_no_hostname_and_no_local_path(name: str) -> None:
    text = (BENCH / name).read_text()
    assert socket.gethostname() not in re.findall(r"[\w.-]+", text)
    assert not re.search(r"/(tmp|home|work|root|dev/shm)/", text)


def test_policy_of_the_fault_benchmark_is_valid(tmp_path: Path) -> None:
    assert load_policy(fault.quick_recovery(tmp_path)).recovery.max_resets_per_day == MAX_ENTRIES


def test_start_up_is_judged_in_loads_of_grpc_by_its_median() -> None:
    grpc_load = Quantiles.of([0.1])
    timings = [
        Timing("command.devices", "devices", Quantiles.of([0.12]), grpc_load, LOADED_GRPC),
        Timing("command.doctor", "doctor", Quantiles.of([0.3]), grpc_load, LOADED_GRPC),
        Timing("start.service", "start", Quantiles.of([0.4]), grpc_load, "bare interpreter"),
    ]
    found = {each.name: (each.met, bool(each.cause)) for each in evaluate_targets(timings, ())}
    assert found["start-up.devices"] == (True, False)
    assert found["start-up.doctor"] == (False, True)
    assert "start-up.service" not in found


def test_processor_time_is_judged_on_the_largest_node_in_use() -> None:
    amounts = [
        Amount(f"in-use.devices-{size}.cpu", "", value, "%") for size, value in ((4, 1.0), (256, 2.0), (32, 4.0))
    ]
    (found,) = evaluate_targets((), [*amounts, Amount("in-use.devices-512.cpu.service", "", 9.0, "%")])
    assert (found.name, found.measured) == ("in-use.cpu", 2.0)


# -- scale -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("at", "values", "expected"),
    [([0, 1, 2], [5, 7, 9], 2.0), ([0, 10], [3, 3], 0.0), ([0, 1, 2, 3], [1, 0, 1, 0], -0.2)],
)
def test_slope_is_that_of_the_line_with_the_least_squares(
    at: list[float], values: list[float], expected: float
) -> None:
    assert slope(at, values) == pytest.approx(expected)


@pytest.mark.parametrize(("at", "values"), [([], []), ([1.0], [1.0]), ([1.0, 1.0], [1.0, 2.0]), ([1.0, 2.0], [1.0])])
def test_slope_of_a_single_position_is_an_error(at: list[float], values: list[float]) -> None:
    with pytest.raises(ValueError, match="at least two positions"):
        slope(at, values)


@pytest.mark.parametrize("pods", [1, 3, 7])
async def test_every_due_restart_is_answered_or_missed_and_a_pod_restarts_once_at_a_time(pods: int) -> None:
    running: set[int] = set()

    async def call(pod: int) -> None:
        assert pod not in running
        running.add(pod)
        for _ in range(50):
            await asyncio.sleep(0)
        running.remove(pod)

    load = scale.Load(rate=1000.0, seconds=0.1)
    await scale.restarts(call, pods, load)
    assert len(load.answered) + load.missed == 100


async def test_refused_restart_is_counted_by_its_message() -> None:
    async def call(pod: int) -> None:
        raise grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata(), "no service")

    load = scale.Load(rate=1000.0, seconds=0.01)
    await scale.restarts(call, 2, load)
    assert load.refusals["UNAVAILABLE: no service"] + load.missed == 10
    assert not load.sustained


def full_load(rate: float, answered: int, missed: int) -> scale.Load:
    load = scale.Load(rate, 10.0, missed=missed, echoes=[0.001], cpu={"service": 50.0, "plugin": 5.0})
    load.answered = [(number / 10, 0.01) for number in range(answered)]
    load.samples = [scale.Sample(0.0, 100.0, 4_000, 7), scale.Sample(10.0, 101.0, 404_000, 207)]
    return load


def test_rate_is_sustained_while_at_most_one_restart_of_a_hundred_was_missed() -> None:
    assert full_load(10.0, 99, 1).sustained
    assert not full_load(10.0, 98, 2).sustained


def test_scale_tables_state_durations_growth_and_ledger_of_each_rate() -> None:
    shown = scale.render("a node", [full_load(10.0, 100, 0), full_load(20.0, 100, 100)])
    assert "| 10 | 10.0 | yes | 0 | 0 | 10.0 ms | 10.0 ms | 1.0 ms | 1.0 ms | 10.0 | 10.0 | 50 % | 5 % |" in shown
    assert "| 20 | 10.0 | **no** | 100 | 0 |" in shown
    assert "| 10 | +0.0 ms a minute | 101 MB | +6.00 MB a minute | 4,000 bytes | 2.00 |" in shown


# -- peers -------------------------------------------------------------------------------------------------------------


def peer_row(contestant: str, measured: Quantiles | None, unanswered: int = 0) -> peers.PeerRow:
    reference = Quantiles(100, 0.001, 0.002, 0.003)
    return peers.PeerRow("a call", contestant, measured, reference, "echo", unanswered=unanswered, limit=10.0)


def test_peers_table_shows_each_figure_as_a_ratio_and_lists_contestants_below_each_other() -> None:
    other = peers.PeerRow(
        "memory, 2 processes", "ours", Quantiles.of([30.0]), Quantiles.of([10.0]), "server", unit="MB"
    )
    rows = [peer_row("ours", Quantiles(100, 0.0015, 0.008, 0.01)), other, peer_row("theirs", Quantiles.of([2.5]))]
    lines = [line for line in peers.render(rows, binary=True).splitlines() if line.startswith("| ")][2:]
    assert lines == [
        "| a call | ours | 1.5 ms | 8 ms | echo | 1 ms | 2 ms | 1.5 | 4 | 100 |",
        "| a call | theirs | 2,500 ms | 2,500 ms | echo | 1 ms | 2 ms | 2.5e+03 | 1.25e+03 | 1 |",
        "| memory, 2 processes | ours | 30 MB | 30 MB | server | 10 MB | 10 MB | 3 | 3 | 1 |",
    ]


def test_peers_table_names_a_call_without_an_answer() -> None:
    table = peers.render([peer_row("theirs", None, unanswered=1)], binary=True)
    assert "| a call | theirs | none within 10 s | none within 10 s | echo | 1 ms | 2 ms |  |  | 0 |" in table


@pytest.mark.parametrize("binary", [False, True])
def test_peers_table_states_whether_the_binary_of_nvidias_plugin_was_missing(binary: bool) -> None:
    assert ("is not in this table" in peers.render([peer_row("ours", Quantiles.of([0.1]))], binary)) is not binary


@pytest.mark.parametrize("path", ["/nonexistent/plugin", "/tmp"])
def test_peers_refuses_a_path_that_is_no_executable_file(
    path: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["bench.peers", "--nvidia-plugin", path])
    with pytest.raises(SystemExit) as ended:
        peers.main()
    assert ended.value.code == 2
    assert "no executable file" in capsys.readouterr().err
