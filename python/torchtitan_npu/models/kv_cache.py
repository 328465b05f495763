"""Keys and values of the positions that a model has seen, so that the next ones need not compute them again.

Letters: L layer, B batch, K key/value heads, T new positions, S all positions up to and with them, D head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor


class KeyValueCache:
    """Room for the keys and values of all layers; without gradients.

    A forward that gets it computes the positions from ``length`` on: every attention adds its keys and values by
    :meth:`extend` and reads all of them, and at the end ``length`` is moved behind the new positions. Until then, and
    where forward fails, the cache holds what it held before. A smaller ``length`` forgets the positions behind it.

    Args:
        num_layers, batch_size, n_kv_heads, capacity, head_dim: the cache is twice
            ``[num_layers, batch_size, n_kv_heads, capacity, head_dim]``.
        dtype, device: of keys and values as the layers compute them.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        batch_size: int,
        n_kv_heads: int,
        capacity: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (num_layers, batch_size, n_kv_heads, capacity, head_dim)
        # Not filled: the system gives pages when they are written.
        self._keys_LBKSD = torch.empty(shape, dtype=dtype, device=device)
        self._values_LBKSD = torch.empty(shape, dtype=dtype, device=device)
        self.capacity = capacity
        self.length = 0
        """Positions that are held; the next one's number."""

    @property
    def num_bytes(self) -> int:
        """Of the whole room: ``2 L B K capacity D`` elements."""
        return self._keys_LBKSD.nbytes + self._values_LBKSD.nbytes

    def extend(self, layer_index: int, k_BKTD: Tensor, v_BKTD: Tensor) -> tuple[Tensor, Tensor]:
        """Keep what ``layer_index`` computed for the next T positions.

        Returns:
            Keys and values ``[B, K, length + T, D]`` of all positions; views.

        Raises:
            ValueError: there is no room for T more.
        """
        assert k_BKTD.dtype == self._keys_LBKSD.dtype and not k_BKTD.requires_grad
        end = self.length + k_BKTD.shape[2]
        if end > self.capacity:
            raise ValueError(
                f"the cache has room for {self.capacity} positions, and {end} are needed; make it larger, or give it "
                "fewer tokens"
            )
        k_BKSD, v_BKSD = self._keys_LBKSD[layer_index, :, :, :end], self._values_LBKSD[layer_index, :, :, :end]
        k_BKSD[:, :, self.length :] = k_BKTD
        v_BKSD[:, :, self.length :] = v_BKTD
        return k_BKSD, v_BKSD
