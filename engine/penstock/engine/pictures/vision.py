"""What a model sees in pictures: its vision part as transformers has it, on a thread beside the steps."""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from penstock.engine.pictures.rows import SeenPicture
from penstock.errors import ModelError, PenstockError

KEPT_BYTES = 256 * 2**20
"""How much of what was seen is kept at most, for pictures that are asked about again."""

Pixels = Mapping[str, Tensor]
"""What the model's vision part reads of one picture, by transformers' names."""


class Vision:
    """The vision part of a model. Any thread may call it."""

    def __init__(self, module: Any, attention: str, kept_bytes: int = KEPT_BYTES) -> None:
        """`attention` is the implementation that transformers would use."""
        self._module, self._attention, self._kept_bytes = module, attention, kept_bytes
        self._thread = ThreadPoolExecutor(1, "vision")  # starts none by itself
        self.num_threads = 1
        """How many of torch's threads compute what is seen; the steps have their own."""
        self._lock = Lock()
        self._kept: OrderedDict[bytes, Future[SeenPicture]] = OrderedDict()
        """By key, the least recently used first: what was seen, and what is to be seen."""

    def see(self, key: bytes, read: Callable[[], Pixels], num_rows: int) -> "Future[SeenPicture]":
        """Return what the model sees in a picture: kept under this key, or computed on the thread, of what `read`
        returns there.

        The future raises what `read` does, and `ModelError` where that are no numbers, or not so many rows.
        """
        with self._lock:
            if (found := self._kept.get(key)) is not None:
                self._kept.move_to_end(key)
                return found
            found = self._kept[key] = self._thread.submit(self._look, read, num_rows)
        found.add_done_callback(partial(self._bound_kept, key))
        return found

    def _bound_kept(self, key: bytes, last: "Future[SeenPicture]") -> None:
        """Forget a picture that could not be seen, and the least recently used ones while all take too much memory."""
        with self._lock:
            if not _is_seen(last) and self._kept.get(key) is last:
                del self._kept[key]
            sizes = {one: seen.result().num_bytes for one, seen in self._kept.items() if _is_seen(seen)}
            num_bytes = sum(sizes.values())
            for one, size in sizes.items():
                if num_bytes <= self._kept_bytes:
                    break
                del self._kept[one]
                num_bytes -= size

    @torch.inference_mode()
    def _look(self, read: Callable[[], Pixels], num_rows: int) -> SeenPicture:
        """Compute what the model sees in a picture. Raises `ModelError`: others of the step are not to suffer."""
        try:
            torch.set_num_threads(self.num_threads)  # OpenMP has the number for each thread that asks
            rows, added = self._compute(read())
        except PenstockError:
            raise
        except Exception as error:
            raise ModelError(f"the model cannot see a picture: {type(error).__name__}: {error}") from error
        if len(rows) != num_rows:
            raise ModelError(f"the model sees {len(rows)} rows in a picture for which the prompt has {num_rows}")
        if not all(bool(x.isfinite().all()) for x in (rows, *added)):
            raise ModelError("what the model sees in a picture is not a number")
        return SeenPicture(rows, added)

    def _compute(self, pixels: Pixels) -> tuple[Tensor, tuple[Tensor, ...]]:
        # The engine has the whole module attend to its pool.
        self._module.get_encoder(modality="image").set_attn_implementation(self._attention)
        base = getattr(self._module, "model", self._module)
        device = self._module.device
        output = base.get_image_features(**{name: x.to(device) for name, x in pixels.items()}, return_dict=True)
        rows = _join_rows(output.pooler_output)
        return rows, tuple(map(_join_rows, getattr(output, "deepstack_features", None) or ()))

    def close(self) -> None:
        """Drop what is still to be seen."""
        self._thread.shutdown(wait=False, cancel_futures=True)


def _is_seen(seen: "Future[SeenPicture]") -> bool:
    return seen.done() and not seen.cancelled() and seen.exception() is None


def _join_rows(found: Any) -> Tensor:
    """Return rows [rows, size] of a tensor, or of one for each tile."""
    rows: Tensor = torch.cat(list(found)) if isinstance(found, (list, tuple)) else found
    return rows.reshape(-1, rows.shape[-1])
