"""Preallocated key/value storage with per-row lengths and path compaction.

All layers of one shape share one tensor [layers, 2, batch, kv_heads, capacity, head_dim], so that keeping an accepted path is one gather and one
scatter. Sliding-window layers keep all positions too; the window is put into the mask (transformers' own sliding layers drop K/V).

    slots of a row:   0 ............ length | root, draft nodes ... | free ......... capacity
                      committed, by position  written by verify      garbage, never attended
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import DynamicLayer


class TreeCache(Cache):  # type: ignore[misc]  # transformers is not followed by mypy
    """A transformers cache whose `update` writes at the slots announced by `place` and returns the visible prefix.

    Holds `batch` rows of `capacity` slots. Storage is allocated by the first `update`, which tells heads, width, dtype and device.
    """

    def __init__(self, num_layers: int, batch: int, capacity: int) -> None:
        super().__init__(layer_class_to_replicate=DynamicLayer)
        self.num_layers, self.batch, self.capacity = num_layers, batch, capacity
        self._shared: Tensor | None = None
        self._odd: dict[int, Tensor] = {}  # layers whose shape differs from the first one's
        self._views: dict[int, tuple[Tensor, Tensor]] = {}  # keys and values of each layer seen
        self._slots_BN: Tensor | None = None
        self._start: int | None = None
        self._visible = 0

    def place(self, slots_BN: Tensor, visible: int, start: int | None) -> None:
        """Announce where the next forward's N tokens go. Slots at or past `visible` are not returned.

        `start`: set if every row writes start .. start + N - 1.
        """
        if visible > self.capacity:
            raise ValueError(f"the cache holds {self.capacity} positions a row, {visible} were asked for")
        self._slots_BN, self._visible, self._start = slots_BN, visible, start

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store K and V [B, kv_heads, N, head_dim] of one layer; return all visible ones."""
        if layer_idx not in self._views:
            store = self._layer(layer_idx, key_states, value_states)
            self._views[layer_idx] = (store[0], store[1])
        keys, values = self._views[layer_idx]
        if key_states.shape[0] != self.batch:  # copying would broadcast it
            raise ValueError(f"the cache was allocated for {self.batch} rows, the forward pass has {key_states.shape[0]}")
        assert self._slots_BN is not None, "place() comes before the forward pass"
        if self._start is not None:
            nodes = key_states.shape[2]
            keys.narrow(2, self._start, nodes).copy_(key_states)
            values.narrow(2, self._start, nodes).copy_(value_states)
        else:
            rows = torch.arange(self.batch, device=keys.device).unsqueeze(1)
            keys[rows, :, self._slots_BN] = key_states.transpose(1, 2)
            values[rows, :, self._slots_BN] = value_states.transpose(1, 2)
        return keys.narrow(2, 0, self._visible), values.narrow(2, 0, self._visible)

    def _layer(self, index: int, key_states: Tensor, value_states: Tensor) -> Tensor:
        if key_states.shape != value_states.shape:
            raise ValueError(
                f"layer {index}: keys {tuple(key_states.shape)} and values {tuple(value_states.shape)} of different shapes are not supported"
            )
        batch, heads, _, width = key_states.shape
        shape = (2, self.batch, heads, self.capacity, width)
        if batch != self.batch:
            raise ValueError(f"the cache was allocated for {self.batch} rows, the forward pass has {batch}")
        if self._shared is None:
            # Zeros, not empty: a masked slot still enters 0 * value, and NaN garbage would spread.
            self._shared = torch.zeros((self.num_layers, *shape), dtype=key_states.dtype, device=key_states.device)
        if self._shared.shape[1:] == shape:
            return self._shared[index]
        if index not in self._odd:
            self._odd[index] = torch.zeros(shape, dtype=key_states.dtype, device=key_states.device)
        return self._odd[index]

    def tensors(self) -> list[Tensor]:
        """The storage."""
        return [store for store in (self._shared, *self._odd.values()) if store is not None]

    def move(self, source_BP: Tensor, target_BP: Tensor) -> None:
        """Copy slots source[b, i] -> target[b, i] of every layer (reads first, then writes, so the ranges may overlap)."""
        for store in self.tensors():
            view = store.view(-1, *store.shape[-4:])  # [layers * 2, B, heads, capacity, width]
            shape = (view.shape[0], view.shape[1], view.shape[2], source_BP.shape[1], view.shape[4])
            kept = view.gather(3, source_BP.view(1, self.batch, 1, -1, 1).expand(shape))
            view.scatter_(3, target_BP.view(1, self.batch, 1, -1, 1).expand(shape), kept)

    def get_seq_length(self, layer_idx: int = 0, *args: Any) -> int:
        """Visible slots; masks and positions are always given explicitly, so models need it only for bookkeeping."""
        return self._visible

    @property
    def is_compileable(self) -> bool:
        """Ours is driven by our engine, never compiled by `generate`."""
        return False
