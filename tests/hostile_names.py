"""Names that a tenant or a local user may give to cgroups, directories and processes, chosen to mislead a parser.

They contain every character that Python treats as a line end or as whitespace, bytes that are not UTF-8, and fragments
of the texts in which such names appear.
"""

from __future__ import annotations

from hypothesis import strategies as st

from tests.attacks.tools import MISLEADING_SPACES

__all__ = ["MISLEADING_SPACES", "path_of_components"]


def _component(*pieces: bytes, line_breaks: bool = False) -> st.SearchStrategy[bytes]:
    r"""One component of a path: any bytes except ``/`` and NUL.

    Args:
        pieces: texts from which the name may be built; slashes in them are left out.
        line_breaks: whether it may contain ``\n``, which the kernel refuses in the names of cgroups since Linux 5.13.
    """
    part = st.one_of(
        st.sampled_from(MISLEADING_SPACES),
        st.sampled_from([b" ", b"\t", b"\x85", b"\xa0", b"\xff", b"\\012", b" (deleted)", b" - cgroup2 cgroup2 rw"]),
        st.sampled_from([b"a", b"x", *pieces]),
        st.binary(max_size=4),
        *([st.just(b"\n")] if line_breaks else []),
    )

    def cleaned(parts: list[bytes]) -> bytes:
        name = b"".join(parts).replace(b"/", b"").replace(b"\0", b"")
        return (name if line_breaks else name.replace(b"\n", b""))[:255]

    return st.lists(part, min_size=1, max_size=8).map(cleaned).filter(lambda name: name not in (b"", b".", b".."))


def path_of_components(*pieces: bytes, line_breaks: bool = False) -> st.SearchStrategy[bytes]:
    """A path of one to four such components, without a leading slash: pieces may spread over several components."""
    return st.lists(_component(*pieces, line_breaks=line_breaks), min_size=1, max_size=4).map(b"/".join)
