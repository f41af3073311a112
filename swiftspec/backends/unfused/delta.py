"""Delta layers in torch kernels whose shapes depend on the number of rows only, so that CUDA graphs can contain
them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from swiftspec.backends.reference import delta
from swiftspec.backends.reference.delta import ReferenceDeltaPlan, ReferenceDeltaRows, ReferenceFoldGroup
from swiftspec.model.batch import Batch
from swiftspec.model.packed_model import DeltaTensors


def prepare_delta(batch: Batch, cache: DeltaTensors) -> ReferenceDeltaPlan:
    """Prepares the delta layers of a forward. Reads nothing from the device. For a cache of several sequences it calls
    reference/, which reads on the host.

    Every row reads the folded state of the cache and all slots of the buffers, where those of other branches are
    masked. The terms of a sum therefore depend on where rounds end, unlike those of reference/.
    """
    if cache.state.shape[1] > 1:
        return delta.prepare_delta(batch, cache)
    count, width, device = cache.keys.shape[2], batch.mask.shape[1], batch.mask.device
    own = batch.slots - cache.folded_on_device
    order = _ascending(own)
    own = own.index_select(0, order)
    column = torch.arange(count, device=device) - (batch.kv_len - cache.folded_on_device - width)
    # slots after the window are unused
    window = F.pad(batch.mask, (0, 1)).index_select(0, order).index_select(1, column.clamp(0, width))
    visible = window | (column < 0)
    group = ReferenceFoldGroup(
        rows=torch.arange(len(own), device=device),
        restarts=True,
        folds=(),
        first=0,
        end=count,
        visible=visible,
        own=own,
        earlier=_earlier(visible, own),
    )
    last = _last_slots(visible, cache.conv_width)
    return ReferenceDeltaPlan(cache, [ReferenceDeltaRows(0, order, own, last, [group])])


def _ascending(values: Tensor) -> Tensor:
    """Returns the order [n] in which values [n] ascend, a stable one. Unlike a sort, it allocates no workspace."""
    places = torch.arange(len(values), device=values.device)
    before = (values < values.unsqueeze(1)) | ((values == values.unsqueeze(1)) & (places < places.unsqueeze(1)))
    return torch.empty_like(places).scatter_(0, before.sum(1), places)


def _earlier(visible: Tensor, own: Tensor) -> Tensor:
    """Returns `ReferenceFoldGroup.earlier`."""
    same = own.unsqueeze(1) == own
    repeated = same.tril(-1).any(1)
    return (visible.index_select(1, own) & ~same).tril(-1) & ~repeated


def _last_slots(visible: Tensor, count: int) -> Tensor:
    """Returns the last `count` slots that each row sees, ascending: visible [rows, slots] -> [rows, count], -1 where
    there are fewer."""
    slots = torch.arange(1, visible.shape[1] + 1, device=visible.device)
    from_end = visible.flip(1).cumsum(1).flip(1)  # how many of them are at a slot or after it
    wanted = torch.arange(count, 0, -1, device=visible.device).unsqueeze(1)
    found = visible.unsqueeze(1) & (from_end.unsqueeze(1) == wanted)
    return (found * slots).sum(2) - 1
