"""Prompts as a trie of tokens, so that no token is computed twice.

Sorted token arrays and the lengths that neighbours have in common *are* the trie. `share` cuts a
job into chunks of whole subtrees; `Packed` lays one chunk out as a single row of tokens, each
shared piece before what continues it, with no padding at all.
"""

from array import array
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias

from scorecal.judging.judge import Chunk, Encoded

# A piece is shared in a chunk if that saves so many tokens: each costs a few small kernel calls a
# layer, about as long as a few tokens' matrix products.
_WORTH_SHARING = 8
# A piece is run by itself, for several chunks, from this length on: below it the products of so
# few rows are slower than computing it again in each chunk.
_WORTH_KEEPING = 16

# Typed arrays: nine times smaller than lists of Python numbers, and compared like them.
Tokens: TypeAlias = "array[int]"


def common_prefix(one: Tokens, other: Tokens) -> int:
    """Length of the common prefix of two token arrays."""
    limit = min(len(one), len(other))
    if one[:limit] == other[:limit]:
        return limit
    low = 0  # one[:low] == other[:low], one[:limit] != other[:limit]
    while limit - low > 1:
        middle = (low + limit) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            limit = middle
    return low


def trie_tokens(rows: Sequence[Tokens]) -> int:
    """Number of different prefixes of all rows: what must be computed at least once."""
    return sum(len(row) - common for row, common in _neighbours(rows))


def _neighbours(rows: Sequence[Tokens]) -> Iterator[tuple[Tokens, int]]:
    """Sorted rows, each with the length that it has in common with the one before."""
    before: Tokens = array("i")
    for row in sorted(rows):
        yield row, common_prefix(before, row)
        before = row


class Node:
    """Rows first..last-1 of a sorted list, whose tokens start..stop-1 are one piece."""

    __slots__ = ("children", "first", "last", "start", "stop", "tokens")

    def __init__(self, first: int, last: int, start: int, stop: int) -> None:
        self.first, self.last, self.start, self.stop = first, last, start, stop
        self.children: list[Node] = []
        self.tokens = 0
        """Tokens of the subtree."""


def grow(rows: Sequence[Tokens], base: int = 0, extra: Sequence[int] | None = None) -> Node:
    """The tree of sorted rows that agree in their first `base` tokens.

    Args:
        rows: sorted token arrays.
        base: length of what is there already.
        extra: tokens that follow each row, for the count.
    """
    root = _branches(rows, base)
    # Top down: a piece that saves too little goes into each of its continuations.
    open_nodes = [root]
    inner = []
    while open_nodes:
        node = open_nodes.pop()
        inner.append(node)
        kept = []
        candidates = node.children[::-1]
        while candidates:
            child = candidates.pop()
            child.start = node.stop
            saved = (child.stop - child.start) * (child.last - child.first - 1)
            if child.children and saved < _WORTH_SHARING:
                candidates += child.children[::-1]
            else:
                kept.append(child)
        node.children = kept
        open_nodes += [child for child in kept if child.children]
    for node in reversed(inner):  # children before parents
        for child in node.children:
            if not child.children:
                child.tokens = child.stop - child.start + (extra[child.first] if extra else 0)
        node.tokens = node.stop - node.start + sum(child.tokens for child in node.children)
    return root


def _branches(rows: Sequence[Tokens], base: int) -> Node:
    """The compressed trie, a leaf for each row, by one pass over neighbours."""
    root = Node(0, len(rows), base, base)
    path = [root]
    for index, row in enumerate(rows):
        common = common_prefix(rows[index - 1], row) if index else base
        while path[-1].stop > common:
            closed = path.pop()
            closed.last = index
            if path[-1].stop < common:
                path[-1].children[-1] = middle = Node(closed.first, index, 0, common)
                middle.children.append(closed)
                path.append(middle)
        if path[-1].stop < common:
            leaf = path[-1].children[-1]
            path[-1].children[-1] = middle = Node(leaf.first, index, 0, common)
            middle.children.append(leaf)
            path.append(middle)
        path[-1].children.append(Node(index, index + 1, 0, len(row)))
    for node in path:
        node.last = len(rows)
    return root


def continued(rows: Sequence[Tokens], tails: Sequence[Sequence[Sequence[int]]]) -> list[Tokens]:
    """Each row with each of its tails, in order."""
    return [row + array("i", tail) for row, ends in zip(rows, tails, strict=True) for tail in ends]


def share(
    rows: Sequence[Tokens], tails: Sequence[Sequence[Sequence[int]]], budget: int
) -> list[Chunk]:
    """Cut a job into chunks of at most `budget` tokens, each under one shared beginning.

    A subtree that fits is one unit, and neighbours are put together while they fit. What a larger
    subtree begins with is run by itself; a chunk's `cuts` name those pieces. A row longer than the
    budget is a chunk of its own.

    Args:
        rows: token arrays of the prompts.
        tails: for each, the label tokens that are run after it.
        budget: tokens a chunk.
    """
    order = sorted(range(len(rows)), key=lambda index: (rows[index], index))
    ordered = [rows[index] for index in order]
    ends = [tails[index] for index in order]
    different = {id(tail): tail for tail in ends}
    sizes = {
        key: trie_tokens([array("i", path) for path in tail]) for key, tail in different.items()
    }
    counts = [sizes[id(tail)] for tail in ends]
    chunks: list[Chunk] = []
    units: list[Node] = []
    fresh = 0  # tokens of pieces that no chunk has used yet

    def flush(cuts: list[int]) -> None:
        nonlocal fresh
        if units:
            span = slice(units[0].first, units[-1].last)
            # Counted as it will be run: neighbours may have a short piece or labels in common.
            sequences = sorted(continued(ordered[span], ends[span]))
            below = grow(sequences, cuts[-1] if cuts else 0).tokens
            chunks.append(Chunk(order[span], cuts, fresh + below))
            fresh = 0
            units.clear()

    path: list[tuple[Iterator[Node], list[int]]] = [(iter([grow(ordered, extra=counts)]), [])]
    while path:
        nodes, cuts = path[-1]
        for node in nodes:
            if node.tokens <= budget or not node.children:
                if sum(unit.tokens for unit in units) + node.tokens > budget:
                    flush(cuts)
                units.append(node)
                continue
            flush(cuts)
            # Each row keeps a token of its own: its last one is where the label is read.
            cut = min(node.stop, *(len(row) - 1 for row in ordered[node.first : node.last]))
            length = cut - (cuts[-1] if cuts else 0)
            if length >= _WORTH_KEEPING:
                fresh += length
                cuts = [*cuts, cut]
            path.append((iter(node.children), cuts))
            break
        else:
            flush(cuts)
            path.pop()
    return chunks


def in_order(encoded: Sequence[Encoded], size: int) -> list[Chunk]:
    """Chunks of `size` prompts, sorted so that an engine's own prefix cache hits."""
    order = sorted(range(len(encoded)), key=encoded.__getitem__)
    return [Chunk(order[start : start + size]) for start in range(0, len(order), size)]


class Piece(NamedTuple):
    """Packed positions start..stop-1; everything that continues it lies in stop..end-1."""

    start: int
    stop: int
    end: int


class Packed:
    """Sequences that share their first `base` tokens, as one row of the tokens after them.

    Attributes:
        ids: token ids.
        positions: place of each token in its own sequence.
        pieces: the tree, in the order of the row.
    """

    def __init__(self, sequences: Sequence[Tokens], base: int = 0) -> None:
        self.base = base
        self.ids: list[int] = []
        self.positions: list[int] = []
        self.pieces: list[Piece] = []
        order = sorted(range(len(sequences)), key=lambda index: sequences[index])
        ordered = [sequences[index] for index in order]
        # For each sequence the pieces that it runs through: first token, packed position.
        self._runs: list[list[tuple[int, int]]] = [[] for _ in sequences]
        above: list[tuple[Node, int]] = []
        waiting = [(grow(ordered, base), [(base, 0)])]
        while waiting:
            node, run = waiting.pop()
            while above and above[-1][0].last <= node.first:
                self._close(*above.pop())
            at = len(self.ids)
            run = [*run, (node.start, at)]
            self.ids += ordered[node.first][node.start : node.stop]
            self.positions += range(node.start, node.stop)
            above.append((node, at))
            waiting += [(child, run) for child in reversed(node.children)]
            if not node.children:
                self._runs[order[node.first]] = run
        while above:
            self._close(*above.pop())
        self.pieces.sort()

    def _close(self, node: Node, at: int) -> None:
        if node.stop > node.start:
            self.pieces.append(Piece(at, at + node.stop - node.start, len(self.ids)))

    def place(self, sequence: int, token: int) -> int:
        """Packed position of a sequence's token, which is not before `base`."""
        start, at = next(run for run in reversed(self._runs[sequence]) if run[0] <= token)
        return at + token - start
