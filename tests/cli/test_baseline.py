"""``scrubber baseline``: differences are shown, and only an operator with a reason can accept them."""

from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from scrubber.api import scrubber_pb2 as pb
from scrubber.domain.errors import InvalidRequest, Refused
from tests.cli.acting_stage import Node, device, served
from tests.cli.stage import Ended, run
from tests.cli.terminal import WIDTHS, agrees_with, at_terminal, terminal

VBIOS, OTHER = "96.00.89.00.01", "96.00.89.00.7f"


def taken(*facts: tuple[str, str, str], conditions: Sequence[tuple[str, str, str]] = ()) -> pb.Baseline:
    return pb.Baseline(
        recorded_at=60.0,
        actor="uid:7",
        reason="new board",
        facts=[pb.Fact(name=name, expected=expected, actual=found) for name, expected, found in facts],
        accepted_conditions=[
            pb.Fact(name=name, expected=expected, actual=found) for name, expected, found in conditions
        ],
    )


SAME = device(0, baseline=taken(("serial", "1650", "1650"), ("vbios", VBIOS, VBIOS)))
CHANGED = device(
    1,
    state="dirty, suspect",
    model="NVIDIA H200",
    attributes={"serial": "1651", "vbios": OTHER, "pci_address": "0000:3b:00.0"},
    baseline=taken(
        ("model", "NVIDIA H200", "NVIDIA H200"),
        ("serial", "1651", "1651"),
        ("vbios", VBIOS, OTHER),
        ("inforom", "G001.0000.03.03", ""),
        conditions=[("pcie-width", "x8 of x16", "x8 of x16"), ("nvlink-down", "2", "")],
    ),
)
UNKNOWN = device(2)


@pytest.fixture
async def node(short_tmp: Path) -> AsyncIterator[Node]:
    async with served(short_tmp) as node:
        node.devices = [SAME, CHANGED, UNKNOWN]
        node.accepted = device(1, baseline=taken(("vbios", OTHER, OTHER)))
        yield node


class TestBaselineShow:
    async def test_json_contains_expected_and_found_facts(self, node: Node, short_tmp: Path) -> None:
        ended = await run(short_tmp, "baseline", "show", "1", "-o", "json")
        assert (ended.code, ended.err) == (1, "")
        assert ended.json == {
            "apiVersion": "cli.scrubber.dev/v1",
            "kind": "Baseline",
            "metadata": {"name": CHANGED.id},
            "index": "1",
            "matches": False,
            "recordedAt": "1970-01-01T00:01:00.000000Z",
            "actor": "uid:7",
            "reason": "new board",
            "facts": [
                {"name": "model", "expected": "NVIDIA H200", "actual": "NVIDIA H200"},
                {"name": "serial", "expected": "1651", "actual": "1651"},
                {"name": "vbios", "expected": VBIOS, "actual": OTHER},
                {"name": "inforom", "expected": "G001.0000.03.03", "actual": None},
            ],
            "acceptedConditions": [
                {"name": "pcie-width", "expected": "x8 of x16", "actual": "x8 of x16"},
                {"name": "nvlink-down", "expected": "2", "actual": None},
            ],
        }

    async def test_show_without_a_device_lists_all_devices(self, node: Node, short_tmp: Path) -> None:
        ended = await run(short_tmp, "baseline", "show", "-o", "json")
        assert (ended.code, ended.json["kind"]) == (1, "BaselineList")
        assert [each["matches"] for each in ended.items] == [True, False, None]

    async def test_device_that_matches_its_baseline_exits_with_zero(self, node: Node, short_tmp: Path) -> None:
        ended = await run(short_tmp, "baseline", "show", SAME.id)
        assert (ended.code, ended.err) == (0, "")
        assert "verdict   as expected" in ended.out

    async def test_device_without_a_baseline_exits_with_one(self, node: Node, short_tmp: Path) -> None:
        ended = await run(short_tmp, "baseline", "show", "2", "-o", "json")
        assert (ended.code, ended.json["matches"], ended.json["recordedAt"]) == (1, None, None)
        assert (ended.json["facts"], ended.json["acceptedConditions"]) == ([], [])

    @pytest.mark.parametrize(
        ("condition", "code"),
        [
            (("pcie-width", "x8 of x16", "x8 of x16"), 0),
            (("pcie-width", "x8 of x16", ""), 0),
            (("pcie-width", "x8 of x16", "x4 of x16"), 1),
            (("pcie-width", "", "x4 of x16"), 1),
        ],
    )
    async def test_exit_code_depends_on_whether_a_condition_is_expected(
        self, node: Node, short_tmp: Path, condition: tuple[str, str, str], code: int
    ) -> None:
        node.devices = [device(0, baseline=taken(conditions=[condition]))]
        assert (await run(short_tmp, "baseline", "show", "0")).code == code

    async def test_node_without_devices_exits_with_one(self, node: Node, short_tmp: Path) -> None:
        node.devices = []
        assert await run(short_tmp, "baseline", "show") == Ended(1, "", "There are no devices on this node.\n")

    @pytest.mark.parametrize("called", ["9", "GPU-"])
    async def test_ambiguous_or_unknown_device_is_a_usage_error(self, node: Node, short_tmp: Path, called: str) -> None:
        ended = await run(short_tmp, "baseline", "show", called)
        assert (ended.code, ended.out) == (2, "")
        assert f"'{called}'" in ended.err

    @pytest.mark.parametrize("columns", WIDTHS)
    @pytest.mark.parametrize("words", [("1",), ()])
    async def test_terminal_output_shows_the_differences(
        self, node: Node, short_tmp: Path, columns: int, words: tuple[str, ...]
    ) -> None:
        environment = {"SCRUBBER_SOCKET_DIR": str(short_tmp)}
        result = await at_terminal("baseline", "show", *words, columns=columns, environment=environment)
        assert result.code == 1
        agrees_with(f"baseline-{'one' if words else 'all'}-{columns}", result.text)


class TestBaselineAccept:
    async def test_accepted_facts_are_the_ones_that_were_shown(self, node: Node, short_tmp: Path) -> None:
        ended = await run(short_tmp, "baseline", "accept", "1", "--reason", "new VBIOS", "--yes", "-o", "json")
        assert ended.code == 0
        assert node.requests == [
            pb.ListDevicesRequest(),
            pb.AcceptBaselineRequest(
                device=CHANGED.id,
                reason="new VBIOS",
                expected_facts={"model": "NVIDIA H200", "serial": "1651", "vbios": OTHER},
            ),
        ]
        assert (ended.json["kind"], ended.json["matches"]) == ("Baseline", True)
        assert OTHER in ended.err

    async def test_device_that_changed_since_being_shown_is_refused(self, node: Node, short_tmp: Path) -> None:
        node.refusal = Refused("Device 1 differs from what you were shown (vbios 6.6.6): check it again.")
        ended = await run(short_tmp, "baseline", "accept", "1", "--reason", "new VBIOS", "--yes")
        assert (ended.code, ended.out) == (3, "")
        assert ended.err.endswith(f"Error: {node.refusal}\n")

    async def test_facts_without_an_earlier_baseline_are_shown_as_new(self, node: Node, short_tmp: Path) -> None:
        node.devices = [device(2, model="NVIDIA H200", attributes={"vbios": OTHER})]
        ended = await run(short_tmp, "baseline", "accept", "2", "--reason", "first look", "--yes", "-o", "name")
        assert ended.code == 0
        assert [line.split() for line in ended.err.splitlines()[-2:]] == [
            ["model", "-", "NVIDIA", "H200", "new"],
            ["vbios", "-", OTHER, "new"],
        ]
        assert dict(node.requests[-1].expected_facts) == {"model": "NVIDIA H200", "vbios": OTHER}

    async def test_accepted_device_with_a_pending_cause_is_rechecked_within_a_minute(
        self, node: Node, short_tmp: Path
    ) -> None:
        node.accepted.cause.CopyFrom(pb.Cause(code="baseline-mismatch", message="vbios is another one."))
        ended = await run(short_tmp, "baseline", "accept", "1", "--reason", "new VBIOS", "--yes")
        assert ended.code == 0
        assert ended.err.endswith(
            "Note: Device 1 is compared with its new baseline at the next check, within a minute. Until then, "
            "`scrubber devices` shows its previous state.\n"
        )

    async def test_unknown_device_is_a_usage_error(self, node: Node, short_tmp: Path) -> None:
        ended = await run(short_tmp, "baseline", "accept", "9", "--reason", "why", "--yes")
        assert (ended.code, ended.out, node.requests) == (2, "", [pb.ListDevicesRequest()])

    @pytest.mark.parametrize("words", [(), ("--reason", " ")])
    async def test_accept_without_a_reason_sends_no_request(
        self, node: Node, short_tmp: Path, words: tuple[str, ...]
    ) -> None:
        ended = await run(short_tmp, "baseline", "accept", "1", "--yes", *words)
        assert (ended.code, ended.out, node.requests) == (2, "", [])
        assert "--reason" in ended.err

    async def test_refused_acceptance_is_one_message(self, node: Node, short_tmp: Path) -> None:
        node.error = InvalidRequest("No device matches '1'.")
        ended = await run(short_tmp, "baseline", "accept", "1", "--reason", "why", "--yes")
        assert ended == Ended(2, "", "Error: No device matches '1'.\n")

    @pytest.mark.parametrize("columns", WIDTHS)
    async def test_confirmation_shows_the_facts_to_be_accepted(self, node: Node, short_tmp: Path, columns: int) -> None:
        words = ("baseline", "accept", "1", "--reason", "new VBIOS")
        environment = {"SCRUBBER_SOCKET_DIR": str(short_tmp)}
        async with terminal(*words, columns=columns, environment=environment) as session:
            await session.shows("Continue? [y/N]")
            agrees_with(f"baseline-accept-{columns}", session.screen.text)

    async def test_confirmation_names_the_warnings_that_become_normal(self, node: Node, short_tmp: Path) -> None:
        narrow = pb.Device()
        narrow.CopyFrom(CHANGED)
        narrow.conditions.extend([pb.Condition(code="pcie-width"), pb.Condition(code="retired-pages")])
        node.devices = [narrow]
        words = ("baseline", "accept", "1", "--reason", "new VBIOS")
        async with terminal(*words, columns=200, environment={"SCRUBBER_SOCKET_DIR": str(short_tmp)}) as session:
            await session.shows("Continue? [y/N]")
            assert "becomes its baseline, including its current warnings (pcie-width)." in session.screen.text
