"""Kernel text is split as the kernel writes it: no name in it forges a line, a field, a pod or a unit."""

from __future__ import annotations

import ast
import os
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from scrubber.adapters.cgroups.hierarchy import Hierarchy, hierarchy_of, sibling_hierarchies
from scrubber.adapters.cgroups.procfs import ProcFs
from scrubber.adapters.cgroups.systemd_unit import parse_systemd_unit
from scrubber.adapters.cgroups.tally import CgroupTally
from scrubber.adapters.cgroups.tree import CgroupTree
from scrubber.adapters.kernel_text import cgroup_paths, fields_in, lines_in, number_in, parse_stat
from scrubber.domain.errors import Unreadable
from tests.hostile_names import MISLEADING_SPACES, path_of_components

OWN = "1f6e5f0e-8a57-4f7c-9d57-0b8c5f2f3a11"
VICTIM = "2d0b51c5-57b5-4a0f-8f0b-7a4f6f1e9c22"
UNIT = "nvidia-persistenced.service"
PIECES = (
    b"0::",
    b"12:pids:",
    b"4:freezer:",
    b"1:name=systemd:",
    b"77:other:",
    b"system.slice",
    UNIT.encode(),
    b"kubepods",
    f"pod{VICTIM}".encode(),
)
LOCAL_USER = b"/user.slice/user-1000.slice/user@1000.service/"
INIT = b"12:pids:/init.scope\n1:name=systemd:/init.scope\n0::/init.scope\n"


def cgroup_text(path: bytes) -> bytes:
    """Return ``/proc/PID/cgroup`` of a process in cgroup ``path`` of every hierarchy. The kernel escapes nothing."""
    names = (b"12:pids:", b"4:freezer:", b"3:cpu,cpuacct:", b"1:name=systemd:", b"0::")
    return b"".join(each + path + b"\n" for each in names)


def kernels_escapes(path: bytes) -> bytes:
    """Return a path as ``/proc/PID/mountinfo`` writes it (``seq_path``, which escapes these four characters)."""
    return b"".join(rb"\%03o" % byte if byte in b" \t\n\\" else bytes([byte]) for byte in path)


# --- lines, fields, numbers ---


@pytest.mark.parametrize("between", MISLEADING_SPACES, ids=repr)
def test_only_a_line_feed_ends_a_line_and_only_space_or_tab_separates_fields(between: bytes) -> None:
    word = b"a" + between + b"b"
    assert lines_in(b"%b\n%b\n" % (word, word)) == [word, word]
    assert fields_in(b" \t%b  %b " % (word, word)) == [word, word]


def test_empty_text_has_no_lines_and_an_empty_line_counts_as_a_line() -> None:
    assert lines_in(b"") == []
    assert lines_in(b"a\n\nb") == [b"a", b"", b"b"]


@pytest.mark.parametrize("text", ["", "-1", "+1", "1_0", " 1", "1\n", "0x1", "٣", "²", "1.0"])
def test_number_consists_of_decimal_digits_only(text: str) -> None:
    with pytest.raises(ValueError, match="not a decimal number"):
        number_in(text.encode())
    assert number_in(b"0042") == 42


@given(st.binary(max_size=15))
def test_no_command_name_changes_the_parsed_stat_fields(name: bytes) -> None:
    rest = b") S 7 8 8 0 -1 4194304" + b" 0" * 10 + b" 3 0 4242" + b" 0" * 27 + b" 5000 6000 0\n"
    stat = parse_stat(b"1234 (" + name.replace(b"\0", b"") + rest)
    assert (stat.pid, stat.state, stat.parent, stat.started, stat.threads) == (1234, "S", 7, 4242, 3)


# --- /proc/PID/cgroup ---


@given(path_of_components(*PIECES))
def test_cgroup_name_cannot_forge_a_line(name: bytes) -> None:
    path = b"/kubepods/pod%b/%b" % (OWN.encode(), name)
    expected = dict.fromkeys(("pids", "freezer", "cpu,cpuacct", "name=systemd", ""), os.fsdecode(path))
    assert cgroup_paths(cgroup_text(path)) == expected


@pytest.mark.parametrize(
    "text",
    [
        b"4:pids:/kubepods/a\n12:pids:/b\n",
        b"4:pids:/kubepods/a\n4:freezer:/b\n",
        b"4:cpu,cpuacct:/a\n3:cpuacct:/b\n",
        b"0::/a\n0::/b\n",
        b"4:pids:/a\nb\n0::/\n",
        b"4:pids:/a\n\n",
        b"0:pids:/a\n",
        b"4::/a\n",
        b"4:pids:a\n",
        b"x:pids:/a\n",
        b"\xd9\xa4:pids:/a\n",
    ],
    ids=repr,
)
def test_duplicate_or_malformed_line_of_a_hierarchy_is_unreadable(text: bytes) -> None:
    with pytest.raises(Unreadable, match="not in the kernel's format"):
        cgroup_paths(text)


@pytest.fixture(scope="module")
def trees(tmp_path_factory: pytest.TempPathFactory) -> list[CgroupTree]:
    root = tmp_path_factory.mktemp("cgroup")
    (root / "kubepods").mkdir()
    controllers = (frozenset[str](), frozenset({"pids"}), frozenset({"freezer"}), frozenset({"name=systemd"}))
    return [CgroupTree(Hierarchy(root, 1 if each else 2, each, "/"), ProcFs()) for each in controllers]


@given(path_of_components(*PIECES, line_breaks=True))
def test_no_process_is_attributed_to_another_pod_by_its_cgroup_name(trees: list[CgroupTree], name: bytes) -> None:
    """Includes names with line breaks, which kernels before 5.13 permit: those may be reported as unreadable."""
    text = cgroup_text(b"/kubepods/pod%b/%b" % (OWN.encode(), name))
    try:
        paths = cgroup_paths(text)
    except Unreadable:
        assert b"\n" in name
    else:
        assert {tree.pod_uid_in(paths) for tree in trees} == {OWN}


@pytest.mark.parametrize("end", MISLEADING_SPACES, ids=repr)
def test_running_pod_is_not_reported_empty_because_of_a_forged_line(tmp_path: Path, end: bytes) -> None:
    """In a pod with several v1 cgroups every process is inspected, and here no process list contains the only one."""
    main, tree = one_process_of_a_v1_pod(tmp_path, b"x" + end + b"8:pids:/elsewhere")
    members = tree.members(main, "main", CgroupTally(OWN, ProcFs(tmp_path)))
    assert [each.pid for each in members or ()] == [77]


def test_pod_is_unreadable_while_the_cgroups_of_a_candidate_process_are_unreadable(tmp_path: Path) -> None:
    main, tree = one_process_of_a_v1_pod(tmp_path, b"x\n8:pids:/elsewhere")
    with pytest.raises(Unreadable, match="not in the kernel's format"):
        tree.members(main, "main", CgroupTally(OWN, ProcFs(tmp_path)))
    (main.parent.parent / f"pod{VICTIM}" / "main" / "inner").mkdir(parents=True)
    assert (
        tree.members(main.parent.parent / f"pod{VICTIM}" / "main", "main", CgroupTally(VICTIM, ProcFs(tmp_path))) == []
    )


def one_process_of_a_v1_pod(root: Path, name: bytes) -> tuple[Path, CgroupTree]:
    """Build a proc file system with process 77, which is in a cgroup of that ``name`` in the hierarchy listed first."""
    main = root / "cgroup" / "kubepods" / f"pod{OWN}" / "main"
    (main / "inner").mkdir(parents=True)
    process = root / "77"
    process.mkdir()
    (process / "stat").write_bytes(b"77 (a) S 1 1 1 0 -1 0" + b" 0" * 10 + b" 1 0 4711" + b" 0" * 30)
    genuine = b"8:pids:/kubepods/pod%b/main/inner\n0::/\n" % OWN.encode()
    (process / "cgroup").write_bytes(b"9:name=systemd:/user.slice/" + name + b"\n" + genuine)
    return main, CgroupTree(Hierarchy(root / "cgroup", 1, frozenset({"pids"}), "/"), ProcFs(root))


@given(path_of_components(*PIECES, line_breaks=True))
def test_no_local_user_is_attributed_to_a_pod_or_a_unit_by_a_cgroup_name(trees: list[CgroupTree], name: bytes) -> None:
    text = cgroup_text(LOCAL_USER + name)
    assert parse_systemd_unit(text, INIT) is None
    try:
        paths = cgroup_paths(text)
    except Unreadable:
        assert b"\n" in name
    else:
        assert {tree.pod_uid_in(paths) for tree in trees} == {None}


@pytest.mark.parametrize("end", [b"\n", *MISLEADING_SPACES], ids=repr)
def test_forged_line_of_a_local_user_does_not_determine_its_systemd_unit(end: bytes) -> None:
    forged = b"x" + end + b"0::/system.slice/" + UNIT.encode()
    assert parse_systemd_unit(b"0::" + LOCAL_USER + forged + b"\n", b"0::/init.scope\n") is None
    assert parse_systemd_unit(b"0::/system.slice/" + UNIT.encode() + b"\n", b"0::/init.scope\n") == UNIT


# --- /proc/PID/mountinfo ---

MOUNTS = rb"""24 30 0:22 / /proc rw,nosuid shared:5 - proc proc rw
30 1 8:1 / / rw,relatime - ext4 /dev/root rw
42 41 0:27 / /sys/fs/cgroup/unified rw,nosuid - cgroup2  rw,nsdelegate
43 41 0:28 / /sys/fs/cgroup/pids rw - cgroup cgroup rw,pids
"""
"""The kernel writes an empty field for a mount without a source, as in the third line here."""


@given(path_of_components(b"cgroup2", b"cgroup", b"unified", b"sys", line_breaks=True), st.booleans())
@example(b"x\x0b1\xc2\xa02\xc2\xa03\xc2\xa0/\xc2\xa0/sys/fs/cgroup/unified/part\xc2\xa0rw", True)
def test_volume_sub_path_of_a_pod_does_not_change_the_parsed_mount_table(name: bytes, last: bool) -> None:
    sub_path = kernels_escapes(b"/var/lib/kubelet/pods/a/volumes/b/" + name)
    point = b"/var/lib/kubelet/pods/%b/volume-subpaths/b/main/0" % VICTIM.encode()
    line = b"900 30 8:1 %b %b rw,relatime shared:9 - ext4 /dev/root rw\n" % (sub_path, point)
    mounts = MOUNTS + line if last else line + MOUNTS
    found = hierarchy_of(Path("/sys/fs/cgroup/unified/part"), mounts)
    assert found == hierarchy_of(Path("/sys/fs/cgroup/unified/part"), MOUNTS)
    assert sibling_hierarchies(found, mounts) == sibling_hierarchies(found, MOUNTS)


@given(path_of_components(line_breaks=True))
def test_hierarchy_is_found_at_any_mount_point_with_any_root_path(name: bytes) -> None:
    point = b"/not-there/" + name
    mounts = b"43 41 0:28 /%b %b rw - cgroup cgroup rw,pids\n" % (kernels_escapes(name), kernels_escapes(point))
    found = hierarchy_of(Path(os.fsdecode(point)) / "part", mounts)
    assert os.fsencode(found.path) == b"/" + name + b"/part"


# --- no other code splits ---

ROOT = Path(__file__).parents[2]
READERS = ("scrubber/adapters", "scrubber/doctor", "plugin")
ALLOWED = {
    ("plugin/cluster/text.py", "split"): "the API server's words, made one line for a log",
    ("plugin/cluster/deploy_labels.py", "strip"): "a list that an operator wrote",
    ("plugin/cluster/pause_labels.py", "strip"): "a list that an operator wrote",
    ("plugin/device_selection.py", "strip"): "a list that an operator wrote",
    ("plugin/dra/slices.py", "strip"): "names that the driver reports, only to be shown",
    ("plugin/nvidia/injection.py", "strip"): "a list that an operator wrote",
    ("plugin/nvidia/settings.py", "strip"): "a list that an operator wrote",
    ("plugin/upstream/allocate_response.py", "strip"): "names that a vendor's plugin answers",
    ("scrubber/adapters/command/answers.py", "splitlines"): "the log of an administrator's program, only to be shown",
    ("scrubber/adapters/command/child.py", "strip"): "output of an administrator's program",
    ("scrubber/adapters/kubelet/pod_resources.py", "split"): "gRPC's words, made one line for a message",
    ("scrubber/adapters/ledger/saved_heads.py", "strip"): "an audit head that an operator gives",
    ("scrubber/adapters/nvidia/dcgm.py", "splitlines"): "an error of dcgmi, only to be shown",
    ("scrubber/adapters/nvidia/dcgm.py", "strip"): "an error of dcgmi, only to be shown",
    ("scrubber/adapters/procwalk/process.py", "strip"): "a command, only to be shown",
    ("scrubber/doctor/container_runtime.py", "strip"): "a list that an operator wrote",
    ("scrubber/doctor/deployment.py", "strip"): "a list that an operator wrote",
    ("scrubber/doctor/dra.py", "strip"): "a setting that an operator wrote",
}
"""Permitted calls that use Python's notion of lines or whitespace: no decision depends on where they split."""


def python_s_own_splitting(source: bytes) -> set[str]:
    """Return the calls in ``source`` that split or strip at Python's lines or whitespace, or read a file as text."""
    found = set()
    for call in (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)):
        given = [*call.args, *(keyword.value for keyword in call.keywords)]
        constants = [each.value for each in given if isinstance(each, ast.Constant)]
        owner = call.func.value if isinstance(call.func, ast.Attribute) else None
        name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        by_whitespace = owner is not None and (not call.args or constants[:1] == [None])
        modes = [each for each in constants if isinstance(each, str) and set(each) <= set("rwxabt+")]
        is_file = name == "open" and not (isinstance(owner, ast.Name) and owner.id in ("os", "self"))
        if (
            (name in ("splitlines", "readlines", "read_text") and owner is not None)
            or (name in ("split", "rsplit", "strip", "lstrip", "rstrip") and by_whitespace)
            or (is_file and not any(set(mode) & set("bwxa") for mode in modes))
        ):
            found.add(name)
    return found


@pytest.mark.parametrize(
    ("source", "found"),
    [
        (b"text.splitlines()", {"splitlines"}),
        (b"path.read_text(encoding='ascii')", {"read_text"}),
        (b"a.split(); a.rsplit(None, 1); a.strip()", {"split", "rsplit", "strip"}),
        (b"open(path); path.open(encoding='utf-8')", {"open"}),
        (b"open(path, 'rb'); path.open('rb'); open(x, 'w'); os.open(path, flags); self.open()", set()),
        (b"a.split(','); a.split(b' ', 2); a.strip(b'/'); read_text(path); path.read_bytes()", set()),
    ],
)
def test_use_of_pythons_own_splitting_is_detected(source: bytes, found: set[str]) -> None:
    assert python_s_own_splitting(source) == found


def test_kernel_text_is_split_only_by_the_kernel_text_functions() -> None:
    files = [path for each in READERS for path in (ROOT / each).rglob("*.py")]
    assert len(files) > 100
    found = {
        (str(path.relative_to(ROOT)), call) for path in files for call in python_s_own_splitting(path.read_bytes())
    }
    assert found == ALLOWED.keys(), (
        "use scrubber/adapters/kernel_text.py for kernel text, bytes and explicit characters elsewhere"
    )
