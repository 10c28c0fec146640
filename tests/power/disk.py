"""A disk that loses what was not synced: from a record of operations, every directory that a power cut may leave.

What POSIX promises, and no more: the data of a file is there after ``fsync`` of the file, a name is there after
``fsync`` of its directory. Any other change may be kept or lost, in any combination: each write, completely or only
some of its sectors, and each change of a name. A sector is written completely or not at all, and a rename is one change.
Each file system promises more than that. The model provides the "powersafe overwrite" that SQLite relies on.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

__all__ = ["Cut", "Disk", "Operation", "Tree", "read_operations", "read_tree", "write_tree"]

SECTOR = 512

Tree = Mapping[str, bytes | None]
"""Relative path → content; None for a directory."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One record of ``recorder.c``, which explains the fields; kind ``A`` is a line of the test itself."""

    kind: str
    path: str
    other: str
    inode: int
    offset: int
    data: bytes


def read_operations(log: bytes) -> list[Operation]:
    found = []
    position = 0
    while position < len(log):
        end = log.index(b"\n", position)
        kind, path, other, inode, offset, size = log[position:end].decode().split("\t")
        position = end + 1 + int(size)
        found.append(Operation(kind, path, other, int(inode), int(offset), log[end + 1 : position]))
    return found


@dataclass(eq=False, slots=True)
class _File:
    durable: bytes = b""


_DIRECTORY = _File()
"""What a name means that means a directory."""


@dataclass(frozen=True, slots=True)
class _Write:
    file: _File
    offset: int
    data: bytes

    def sectors(self) -> range:
        return range(self.offset // SECTOR, -(-(self.offset + len(self.data)) // SECTOR))


@dataclass(frozen=True, slots=True)
class _Resize:
    file: _File
    size: int


@dataclass(frozen=True, slots=True)
class _Names:
    names: Mapping[str, _File | None]


_Change = _Write | _Resize | _Names

_Choice = Mapping[int, frozenset[int] | None]
"""Position of a change that was not lost → the sectors of it that were kept; None for all."""


@dataclass(frozen=True, slots=True)
class Cut:
    """A moment, and one of the directories that a power cut at that moment may leave.

    Attributes:
        moment: number of operations before it.
        marks: the lines of the test before it.
        lost: how many of the changes that were not synced are missing or torn.
    """

    moment: int
    marks: tuple[str, ...]
    lost: int
    tree: Tree


@dataclass
class Disk:
    """The directory ``root``: what is durable, and the changes that are not."""

    root: str
    _inodes: dict[int, _File] = field(default_factory=dict)
    _durable: dict[str, _File] = field(default_factory=dict)
    _names: dict[str, _File] = field(default_factory=dict)
    _pending: list[_Change] = field(default_factory=list)

    @classmethod
    def holding(cls, root: Path) -> Disk:
        """Return a disk on which everything that is now below ``root`` is durable."""
        disk = cls(str(root))
        for path in sorted(root.rglob("*")):
            node = _DIRECTORY if path.is_dir() else _File(path.read_bytes())
            disk._durable[str(path)] = disk._names[str(path)] = node
            if node is not _DIRECTORY:
                disk._inodes[path.stat().st_ino] = node
        return disk

    def cuts(self, operations: Sequence[Operation], dice: Random, each: int, share: float = 1.0) -> Iterator[Cut]:
        """Apply ``operations``; after each change and mark, yield at most ``each`` of the states a power cut may leave.

        The same state after the same marks is yielded once.

        Args:
            share: of the moments without a mark, the share that is looked at.
        """
        marks: tuple[str, ...] = ()
        seen: set[tuple[int, frozenset[tuple[str, bytes | None]]]] = set()
        for moment, operation in enumerate(operations, 1):
            if operation.kind == "A":
                marks = (*marks, operation.data.decode())
            else:
                self._apply(operation)
            if operation.kind in "SD" or (operation.kind != "A" and dice.random() > share):
                continue
            for choice in self._choices(dice, each):
                tree = self._tree(choice)
                key = (len(marks), frozenset(tree.items()))
                if key not in seen:
                    seen.add(key)
                    whole = sum(kept is None for kept in choice.values())
                    yield Cut(moment, marks, len(self._pending) - whole, tree)

    def present(self) -> Tree:
        """Return what processes see: every change, lost or not."""
        return self._tree(dict.fromkeys(range(len(self._pending))))

    def _apply(self, operation: Operation) -> None:
        match operation.kind:
            case "C":
                self._inodes[operation.inode] = node = _File()
                self._rename({operation.path: node})
            case "M":
                self._rename({operation.path: _DIRECTORY})
            case "L":
                self._rename({operation.other: self._names[operation.path]})
            case "R":
                self._rename({operation.path: None, operation.other: self._names[operation.path]})
            case "U":
                self._rename({operation.path: None})
            case "W":
                self._pending.append(_Write(self._inodes[operation.inode], operation.offset, operation.data))
            case "T":
                self._pending.append(_Resize(self._inodes[operation.inode], operation.offset))
            case "S":
                self._sync_file(self._inodes[operation.inode])
            case "D":
                self._sync_directory(operation.path)
            case _:
                raise AssertionError(operation)

    def _rename(self, names: Mapping[str, _File | None]) -> None:
        _put(self._names, names)
        self._pending.append(_Names(names))

    def _sync_file(self, file: _File) -> None:
        changes = [each for each in self._pending if not isinstance(each, _Names) and each.file is file]
        content = bytearray(file.durable)
        for change in changes:
            _change(content, change, None)
        file.durable = bytes(content)
        self._pending = [each for each in self._pending if isinstance(each, _Names) or each.file is not file]

    def _sync_directory(self, path: str) -> None:
        kept: list[_Change] = []
        for change in self._pending:
            if isinstance(change, _Names) and any(os.path.dirname(name) == path for name in change.names):
                _put(self._durable, change.names)
            else:
                kept.append(change)
        self._pending = kept

    def _choices(self, dice: Random, most: int) -> Iterator[_Choice]:
        """Yield at most ``most`` choices of what is kept: first the extremes, then all but one, one alone, and any."""
        everything = range(len(self._pending))
        names = [each for each in everything if isinstance(self._pending[each], _Names)]
        data = [each for each in everything if each not in names]
        choices: list[_Choice] = [{}, dict.fromkeys(everything)]
        if names and data:
            choices += [dict.fromkeys(names), dict.fromkeys(data)]
        if data and isinstance(self._pending[data[-1]], _Write):
            torn = self._torn(data[-1], dice)
            choices += [{**dict.fromkeys(everything), data[-1]: torn}, {data[-1]: torn}]
        single = dice.sample(everything, min(len(everything), max(most - len(choices), 0) // 2))
        for one in single:
            choices += [{other: None for other in everything if other != one}, {one: None}]
        while len(choices) < most and len(everything) > 1:
            choices.append(
                {
                    each: self._torn(each, dice) if dice.random() < 0.3 else None
                    for each in everything
                    if dice.random() < 0.5
                }
            )
        yield from choices[:most]

    def _torn(self, position: int, dice: Random) -> frozenset[int] | None:
        change = self._pending[position]
        if not isinstance(change, _Write):
            return None
        return frozenset(each for each in change.sectors() if dice.random() < 0.5)

    def _tree(self, choice: _Choice) -> dict[str, bytes | None]:
        names = dict(self._durable)
        contents: dict[_File, bytearray] = {}
        for position, change in enumerate(self._pending):
            if position not in choice:
                continue
            if isinstance(change, _Names):
                _put(names, change.names)
            else:
                content = contents.setdefault(change.file, bytearray(change.file.durable))
                _change(content, change, choice[position])
        tree: dict[str, bytes | None] = {}
        for path in sorted(names):  # a directory before what is in it
            parent = os.path.dirname(path)
            if parent != self.root and tree.get(os.path.relpath(parent, self.root), b"") is not None:
                continue  # the directory was lost, and with it all that is in it
            node = names[path]
            tree[os.path.relpath(path, self.root)] = (
                None if node is _DIRECTORY else bytes(contents.get(node, node.durable))
            )
        return tree


def _put(names: dict[str, _File], changes: Mapping[str, _File | None]) -> None:
    for path, node in changes.items():
        if node is None:
            names.pop(path, None)
        else:
            names[path] = node


def _change(content: bytearray, change: _Write | _Resize, kept: frozenset[int] | None) -> None:
    if isinstance(change, _Resize):
        del content[change.size :]
        content.extend(bytes(change.size - len(content)))
        return
    end = change.offset + len(change.data)
    for sector in change.sectors() if kept is not None else (None,):
        if sector is not None and kept is not None and sector not in kept:
            continue
        low = change.offset if sector is None else max(change.offset, sector * SECTOR)
        high = end if sector is None else min(end, (sector + 1) * SECTOR)
        if len(content) < low:
            content.extend(bytes(low - len(content)))
        content[low:high] = change.data[low - change.offset : high - change.offset]


def write_tree(tree: Tree, directory: Path) -> None:
    """Make ``tree`` below the new directory ``directory``, private to this user."""
    directory.mkdir(mode=0o700)
    for name, content in tree.items():
        if content is None:
            (directory / name).mkdir(mode=0o700)
        else:
            descriptor = os.open(directory / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with open(descriptor, "wb") as file:
                file.write(content)


def read_tree(directory: Path) -> Tree:
    return {
        str(path.relative_to(directory)): None if path.is_dir() else path.read_bytes()
        for path in sorted(directory.rglob("*"))
    }
