"""Read and admin access by two groups: a separate directory for each socket, and a clear message for other users.

As root, the callers are real other users. As any other user only one user exists, who has access everywhere.
"""

from __future__ import annotations

import asyncio
import grp
import os
import re
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from scrubber.api.client import AdminClient
from scrubber.api.server import serve
from scrubber.api.sockets import Purpose, Sockets
from scrubber.domain.errors import InvalidConfiguration
from tests.api.service import FakeNode
from tests.api.test_callers import DEADLINE, ROOT, UNPRIVILEGED_UID, call, mode, open_wide

ALL = [each for each in grp.getgrall() if each.gr_gid != 0] if ROOT else [grp.getgrgid(os.getegid())] * 2
ACTING, LOOKING = ALL[0], ALL[1]

TRY = """
import os, sys
path, how, uid, *gids = sys.argv[1:]
if os.geteuid() == 0:
    os.setgroups([int(each) for each in gids])
    os.setgid(int(uid))
    os.setuid(int(uid))
try:
    os.listdir(path) if how == "list" else os.close(os.open(path, os.O_RDONLY))
    print("done")
except PermissionError:
    print("refused")
"""


@asynccontextmanager
async def served(short_tmp: Path, *, acting: str | None = None, looking: str | None = None) -> AsyncIterator[FakeNode]:
    short_tmp.chmod(0o755)
    node = FakeNode()
    async with serve(node, Sockets(short_tmp / "s", admin_group=acting, read_group=looking), grace=0):
        yield node


@pytest.fixture
async def node(short_tmp: Path) -> AsyncIterator[FakeNode]:
    """Provide a node whose operators and readers are two groups."""
    async with served(short_tmp, acting=ACTING.gr_name, looking=LOOKING.gr_name) as node:
        yield node


async def tried(path: Path, how: str, *gids: int) -> str:
    """Return the result for a user in these groups who bypasses the service: ``list`` a directory, ``open`` a file."""
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", TRY, str(path), how, str(UNPRIVILEGED_UID), *map(str, gids)),
        stdout=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(DEADLINE):
        output, _ = await child.communicate()
    return output.decode().strip()


# -- read and admin access ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ask", "gids", "let_in"),
    [
        (Purpose.READ, [LOOKING.gr_gid], True),
        (Purpose.READ, [ACTING.gr_gid, LOOKING.gr_gid], True),
        (Purpose.READ, [ACTING.gr_gid], False),
        (Purpose.READ, [], False),
        (Purpose.ADMIN, [ACTING.gr_gid], True),
        (Purpose.ADMIN, [ACTING.gr_gid, LOOKING.gr_gid], True),
        (Purpose.ADMIN, [LOOKING.gr_gid], False),
        (Purpose.ADMIN, [], False),
        (Purpose.PLUGIN, [ACTING.gr_gid, LOOKING.gr_gid], False),
        (Purpose.PLUGIN, [], False),
    ],
)
async def test_each_group_may_use_only_its_own_sockets(
    ask: Purpose, gids: list[int], let_in: bool, node: FakeNode, short_tmp: Path
) -> None:
    answer = await call(short_tmp / "s", ask, UNPRIVILEGED_UID, *gids)
    assert answer.startswith("PermissionDenied permission-denied") is (ROOT and not let_in)
    assert (answer == "answered") is (let_in or not ROOT)
    acted = ask is Purpose.ADMIN and answer == "answered"
    assert [each[0] for each in node.requests if isinstance(each, tuple)] == (["quarantine"] if acted else [])


async def test_read_group_member_is_refused_on_the_admin_socket_with_the_missing_group(
    node: FakeNode, short_tmp: Path
) -> None:
    answer = await call(short_tmp / "s", Purpose.ADMIN, UNPRIVILEGED_UID, LOOKING.gr_gid)
    if ROOT:
        assert f"uid {UNPRIVILEGED_UID} may not use {short_tmp}/s/admin/admin.sock" in answer
        assert f"join the group {ACTING.gr_name} (usermod -aG {ACTING.gr_name} NAME" in answer
        assert "effective at the next login" in answer
    else:
        assert answer == "answered"


@pytest.mark.parametrize("gids", [[], [ACTING.gr_gid]])
async def test_caller_outside_the_read_group_is_refused_with_the_missing_group(
    gids: list[int], node: FakeNode, short_tmp: Path
) -> None:
    answer = await call(short_tmp / "s", Purpose.READ, UNPRIVILEGED_UID, *gids)
    assert (f"join the group {LOOKING.gr_name} (usermod" in answer) if ROOT else answer == "answered"


async def test_group_without_a_name_is_named_by_its_number(short_tmp: Path) -> None:
    gid = 54399 if ROOT else os.getegid()
    short_tmp.chmod(0o755)
    for place, owner, bits in ((short_tmp / "s", -1, 0o711), (short_tmp / "s/read", gid, 0o750)):
        place.mkdir()
        os.chown(place, -1, owner)
        place.chmod(bits)
    answer = await call(short_tmp / "s", Purpose.READ, UNPRIVILEGED_UID)
    assert ("join the group 54399 (usermod" in answer) if ROOT else answer.startswith("Unavailable")


async def test_read_group_member_past_the_socket_modes_is_refused_by_peer_auth(node: FakeNode, short_tmp: Path) -> None:
    open_wide(short_tmp / "s")
    answer = await call(short_tmp / "s", Purpose.ADMIN, UNPRIVILEGED_UID, LOOKING.gr_gid)
    assert answer.startswith(f"PermissionDenied wrong-user uid {UNPRIVILEGED_UID}") if ROOT else answer == "answered"
    assert ROOT is (node.requests == [])


async def test_root_needs_no_group(node: FakeNode, short_tmp: Path) -> None:
    for ask in Purpose:
        assert await call(short_tmp / "s", ask, os.geteuid()) == "answered"


# -- only one of the groups --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ask", "let_in"), [(Purpose.READ, True), (Purpose.ADMIN, False), (Purpose.PLUGIN, False)])
async def test_read_group_alone_may_read_and_only_the_service_may_act(
    ask: Purpose, let_in: bool, short_tmp: Path
) -> None:
    async with served(short_tmp, looking=LOOKING.gr_name):
        answer = await call(short_tmp / "s", ask, UNPRIVILEGED_UID, LOOKING.gr_gid)
        assert (answer == "answered") is (let_in or not ROOT)
        if ROOT and ask is Purpose.ADMIN:
            assert "grant a group access with scrubber serve --admin-group" in answer


@pytest.mark.parametrize("ask", [Purpose.READ, Purpose.ADMIN])
async def test_one_group_for_both_sockets_may_use_both(ask: Purpose, short_tmp: Path) -> None:
    async with served(short_tmp, acting=ACTING.gr_name, looking=ACTING.gr_name):
        assert await call(short_tmp / "s", ask, UNPRIVILEGED_UID, ACTING.gr_gid) == "answered"


@pytest.mark.parametrize("ask", [Purpose.READ, Purpose.ADMIN])
async def test_operators_may_read_where_no_read_group_is_configured(ask: Purpose, short_tmp: Path) -> None:
    async with served(short_tmp, acting=ACTING.gr_name):
        assert await call(short_tmp / "s", ask, UNPRIVILEGED_UID, ACTING.gr_gid) == "answered"
        other = await call(short_tmp / "s", ask, UNPRIVILEGED_UID, LOOKING.gr_gid)
        assert (f"join the group {ACTING.gr_name} (usermod" in other) if ROOT else other == "answered"


async def test_restart_without_a_read_group_revokes_its_access(short_tmp: Path) -> None:
    async with served(short_tmp, acting=ACTING.gr_name, looking=LOOKING.gr_name):
        assert await call(short_tmp / "s", Purpose.READ, UNPRIVILEGED_UID, LOOKING.gr_gid) == "answered"
    async with served(short_tmp, acting=ACTING.gr_name):
        answer = await call(short_tmp / "s", Purpose.READ, UNPRIVILEGED_UID, LOOKING.gr_gid)
        assert answer.startswith("PermissionDenied") if ROOT else answer == "answered"
    async with served(short_tmp):
        assert {mode(short_tmp / "s" / purpose.value) for purpose in Purpose} == {"drwx------"}


# -- modes -------------------------------------------------------------------------------------------------------------


async def test_base_directory_is_traversable_but_not_listable_and_each_group_enters_its_own(
    node: FakeNode, short_tmp: Path
) -> None:
    sockets = Sockets(short_tmp / "s")
    assert mode(sockets.directory) == "drwx--x--x"
    for purpose, group in ((Purpose.ADMIN, ACTING), (Purpose.READ, LOOKING)):
        path = sockets.path(purpose)
        assert (mode(path), mode(path.parent)) == ("srw-rw----", "drwxr-x---")
        assert (path.stat().st_gid, path.parent.stat().st_gid) == (group.gr_gid, group.gr_gid)
    assert mode(sockets.path(Purpose.PLUGIN).parent) == mode(sockets.internal_dir) == "drwx------"


async def test_group_members_cannot_list_the_base_directory_or_open_the_lock(node: FakeNode, short_tmp: Path) -> None:
    """A user who could open the lock, even for reading, could hold it, and no service would start any more."""
    refused = "refused" if ROOT else "done"
    directory = short_tmp / "s"
    gids = (ACTING.gr_gid, LOOKING.gr_gid)
    assert await tried(directory, "list", *gids) == refused
    assert await tried(directory / "lock", "open", *gids) == refused
    for below in ("door", "plugin"):
        assert await tried(directory / below, "list", *gids) == refused
    assert await tried(directory / "read", "list", LOOKING.gr_gid) == "done"
    assert await tried(directory / "admin", "list", LOOKING.gr_gid) == refused


async def test_admin_directory_stays_with_the_service_when_only_a_read_group_is_configured(short_tmp: Path) -> None:
    async with served(short_tmp, looking=LOOKING.gr_name):
        assert mode(short_tmp / "s/admin") == mode(short_tmp / "s/plugin") == "drwx------"
        assert mode(short_tmp / "s/read") == "drwxr-x---"


async def test_groups_added_at_a_later_start_get_access(short_tmp: Path) -> None:
    async with served(short_tmp):
        answer = await call(short_tmp / "s", Purpose.READ, UNPRIVILEGED_UID, LOOKING.gr_gid)
        assert answer.startswith("PermissionDenied") if ROOT else answer == "answered"
    async with served(short_tmp, acting=ACTING.gr_name, looking=LOOKING.gr_name):
        assert await call(short_tmp / "s", Purpose.READ, UNPRIVILEGED_UID, LOOKING.gr_gid) == "answered"


@pytest.mark.parametrize("before", [0o755, 0o711, 0o1777])
async def test_directory_that_is_already_traversable_keeps_its_mode(before: int, short_tmp: Path) -> None:
    directory = short_tmp / "s"
    directory.mkdir()
    directory.chmod(before)
    async with served(short_tmp, acting=ACTING.gr_name, looking=LOOKING.gr_name):
        assert await call(directory, Purpose.READ, UNPRIVILEGED_UID, LOOKING.gr_gid) == "answered"
        assert directory.stat().st_mode & 0o7777 == before


KEPT_OUT = (
    [
        (0o700, 0, [ACTING, LOOKING], "chmod a+x"),
        (0o750, 0, [ACTING, LOOKING], "chmod a+x"),
        (0o750, ACTING.gr_gid, [LOOKING], "chmod a+x"),
        (0o740, LOOKING.gr_gid, [ACTING, LOOKING], "chmod a+x"),
    ]
    if ROOT
    else [(0o700, os.getegid(), [ACTING], "chmod g+x")]
)


@pytest.mark.parametrize(("before", "gid", "kept_out", "remedy"), KEPT_OUT)
async def test_directory_that_excludes_a_group_is_refused_with_the_remedy(
    before: int, gid: int, kept_out: list[grp.struct_group], remedy: str, short_tmp: Path
) -> None:
    directory = short_tmp / "s"
    directory.mkdir()
    os.chown(directory, -1, gid)
    directory.chmod(before)
    with pytest.raises(InvalidConfiguration, match=re.escape(f"{remedy} {directory}")) as refused:
        async with served(short_tmp, acting=ACTING.gr_name, looking=LOOKING.gr_name):
            raise AssertionError("it serves although no group can reach the socket")
    for group in (ACTING, LOOKING):
        assert (group.gr_name in str(refused.value).split("(")[-1]) is (group in kept_out)
    assert directory.stat().st_mode & 0o7777 == before
    assert list(directory.iterdir()) == []


@pytest.mark.parametrize("groups", [{"acting": "no-such-group"}, {"looking": "no-such-group"}])
async def test_unknown_group_is_refused_before_any_file_is_created(groups: dict[str, str], short_tmp: Path) -> None:
    with pytest.raises(InvalidConfiguration, match="The group 'no-such-group' does not exist on this node"):
        async with served(short_tmp, **groups):
            raise AssertionError("it serves with an unknown group")
    assert not (short_tmp / "s").exists()


async def test_operator_action_is_recorded_under_the_operators_uid(node: FakeNode, short_tmp: Path) -> None:
    assert await call(short_tmp / "s", Purpose.ADMIN, UNPRIVILEGED_UID, ACTING.gr_gid) == "answered"
    async with AdminClient(short_tmp / "s") as admin:
        await admin.quarantine("0", "and the service's own user")
    actors = [each[-1] for each in node.requests if isinstance(each, tuple)]
    assert actors == [f"uid:{UNPRIVILEGED_UID if ROOT else os.geteuid()}", f"uid:{os.geteuid()}"]
