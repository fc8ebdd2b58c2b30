"""Attention over a packed trie: each shared piece once for everything that continues it.

A token's context is cut into pieces: its own one up to itself, those above it in the chunk, and
the beginning that was kept. Attention to each piece is one kernel call for all tokens below it, and
the parts are merged by their log-sum-exp (cascade attention; Juravsky et al. 2024, Ye et al. 2024).
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from scorecal.judging.trie import Packed, Piece

# Own pieces are attended to in padded groups of similar length, at most so much longer.
_PADDING = 1.25
_SCORES = 1 << 24  # attention scores held at once


Kept = dict[int, tuple[Tensor, Tensor]]
"""Keys and values [1, heads, tokens, width] of a beginning that chunks share, by layer."""


class Cascade:
    """One forward pass over a packed chunk.

    Args:
        packed: the chunk.
        above: keys and values of its first `packed.base` tokens.
        device: where the network runs.
        keep: collect in `kept` the keys and values of `above` and this chunk together.
    """

    def __init__(self, packed: Packed, above: Kept, device: torch.device, *, keep: bool) -> None:
        self.packed = packed
        self.above = above
        self.kept: Kept | None = {} if keep else None
        self.positions = torch.tensor(packed.positions, device=device)
        self.longest = max(packed.positions) + 1
        # Once for all layers.
        self._groups = [
            (places.to(device), places[real].to(device), real.flatten().to(device))
            for places, real in _groups(packed.pieces)
        ]

    def attend(
        self,
        module: Any,
        query: Float[Tensor, "1 heads tokens width"],
        key: Float[Tensor, "1 kv_heads tokens width"],
        value: Float[Tensor, "1 kv_heads tokens value_width"],
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Float[Tensor, " heads"] | None = None,
    ) -> Float[Tensor, "1 tokens heads value_width"]:
        """Attention output of one layer, as transformers' attention functions return it."""
        above = self.above.get(module.layer_idx)
        if self.kept is not None:
            self.kept[module.layer_idx] = (
                (torch.cat((above[0], key), 2), torch.cat((above[1], value), 2))
                if above
                else (key, value)
            )
        if window is not None and window >= self.longest:
            window = None  # no row is long enough for it
        kernel = _Kernel(scale, window, softcap, self.positions)
        _, heads, tokens, _ = query.shape
        out = query.new_empty(1, heads, tokens, value.shape[-1], dtype=torch.float32)
        weight = query.new_empty(1, heads, tokens, dtype=torch.float32)
        for places, target, real in self._groups:
            part, mass = kernel.own(query, key, value, places)
            out[:, :, target] = part[:, :, real].float()
            weight[:, :, target] = mass[:, :, real]
        for start, stop, end in self.packed.pieces:
            if end > stop:
                rows, piece = slice(stop, end), slice(start, stop)
                part, mass = kernel.shared(
                    query[:, :, rows], key[:, :, piece], value[:, :, piece],
                    rows, kernel.positions[piece],
                )  # fmt: skip
                _merge(out[:, :, rows], weight[:, :, rows], part, mass)
        if above:
            columns = torch.arange(self.packed.base, device=query.device)
            part, mass = kernel.shared(query, *above, slice(0, tokens), columns)
            _merge(out, weight, part, mass)
        if sinks is not None:  # a logit without a value
            out *= (weight - sinks.float()[:, None]).sigmoid()[..., None]
        return out.to(query.dtype).transpose(1, 2)


def _groups(
    pieces: list[Piece],
) -> Iterator[tuple[Int[Tensor, "pieces tokens"], Bool[Tensor, "pieces tokens"]]]:
    """Packed places of pieces of similar length, shorter ones filled up, and which are real."""
    ordered = sorted(pieces, key=lambda piece: (piece.start - piece.stop, piece.start))
    while ordered:
        longest = ordered[0].stop - ordered[0].start
        count = sum(1 for piece in ordered if (piece.stop - piece.start) * _PADDING >= longest)
        group, ordered = ordered[:count], ordered[count:]
        places = torch.tensor([[piece.start] for piece in group]) + torch.arange(longest)
        last = torch.tensor([[piece.stop - 1] for piece in group])
        yield torch.minimum(places, last), places <= last


class _Kernel(NamedTuple):
    """Attention to one set of keys, with the log-sum-exp of its scores."""

    scale: float
    window: int | None
    softcap: float | None
    positions: Int[Tensor, " tokens"]

    def own(
        self, query: Tensor, key: Tensor, value: Tensor, places: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Causal attention inside pieces."""
        count, length = places.shape
        q, k, v = (part[0, :, places].transpose(0, 1) for part in (query, key, value))
        short = self if self.window is None or length > self.window else self._replace(window=None)
        if short._fused(q, k, v):
            out, mass = _flash(q, k, v, self.scale, causal=True)
        else:
            at = torch.arange(length, device=q.device)
            out, mass = self._plain(q, k, v, at[:, None], at[None, :])
        flat = (1, q.shape[1], count * length)
        return out.transpose(0, 1).reshape(*flat, -1), mass.transpose(0, 1).reshape(flat)

    def shared(
        self, q: Tensor, k: Tensor, v: Tensor, rows: slice, columns: Int[Tensor, " keys"]
    ) -> tuple[Tensor, Tensor]:
        """Attention of all rows to a piece above them, whose keys stand at `columns`."""
        at = self.positions[rows]
        if self.window is None or at.numel() == 0 or int(at.max() - columns[0]) < self.window:
            free = self._replace(window=None)
            if free._fused(q, k, v):
                return _flash(q, k, v, self.scale, causal=False)
            return free._plain(q, k, v, None, None)
        return self._plain(q, k, v, at[:, None], columns[None, :])

    def _fused(self, q: Tensor, k: Tensor, v: Tensor) -> bool:
        plain = self.window is not None or self.softcap is not None
        return q.device.type == "cpu" and not plain and k.shape[-1] == v.shape[-1]

    def _plain(
        self, q: Tensor, k: Tensor, v: Tensor, at: Tensor | None, to: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        repeats = q.shape[1] // k.shape[1]
        k = k.float().repeat_interleave(repeats, 1).mT
        v = v.float().repeat_interleave(repeats, 1)
        outs, masses = [], []
        step = max(1, _SCORES // (q.shape[0] * q.shape[1] * k.shape[-1]))
        for start in range(0, q.shape[2], step):
            scores = q[:, :, start : start + step].float() @ k * self.scale
            if self.softcap is not None:
                scores = (scores / self.softcap).tanh() * self.softcap
            if at is not None and to is not None:
                scores.masked_fill_(~self._visible(at[start : start + step], to), -torch.inf)
            mass = scores.logsumexp(-1)
            # Where a window hides the whole piece there is nothing to weigh.
            weights = (scores - mass.nan_to_num(neginf=0.0)[..., None]).exp()
            outs.append(weights @ v)
            masses.append(mass)
        return torch.cat(outs, 2), torch.cat(masses, 2)

    def _visible(self, at: Tensor, to: Tensor) -> Bool[Tensor, "queries keys"]:
        seen = to <= at
        return seen if self.window is None else seen & (at - to < self.window)


def _flash(q: Tensor, k: Tensor, v: Tensor, scale: float, *, causal: bool) -> tuple[Tensor, Tensor]:
    # The public function keeps the log-sum-exp to itself.
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, causal, attn_mask=None, scale=scale
    )


def _merge(out: Tensor, weight: Tensor, part: Tensor, mass: Tensor) -> None:
    """Add attention to more keys: `out` and `weight` in place."""
    both = torch.logaddexp(weight, mass)
    out.mul_((weight - both).exp_()[..., None])
    out.addcmul_(part.float(), (mass - both).exp_()[..., None])
    weight.copy_(both)
