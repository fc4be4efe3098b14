"""From gradients to new weights: unscale, clip, check, step.

Guarantee: while the finite gate is on, a step whose global loss (or gradient norm, where clipping computes one) is not
finite leaves parameters and optimizer state as they were, on all ranks alike. On CUDA with fused optimizers the gate
stays on the device and the host learns of it at a later step without waiting.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer

from framework.errors import NonFiniteError
from framework.recipe import StepOutput

log = logging.getLogger(__name__)

MAX_OVERFLOWS = 50
NON_FINITE, OVERFLOW, LEFT_OUT = "non-finite", "overflow", "left out"


class Skip(NamedTuple):
    """A step whose update was left out, and why: `non-finite`, `overflow` (of the loss scaler) or `left out`."""

    step: int
    reason: str


class Update:
    """Applies the gradients of one window.

    Args:
        optimizers: All of them step once per step.
        device: Where the run computes.
        clip_norm: Largest gradient norm over all parameters, or none.
        scaler: The loss scaler, for fp16.

    Attributes:
        is_gated: Whether steps that are not finite are left out.
        left_out: Steps whose update is left out whatever the loss says.
    """

    def __init__(
        self,
        optimizers: Mapping[str, Optimizer],
        device: torch.device,
        clip_norm: float | None,
        scaler: GradScaler | None,
    ) -> None:
        self._optimizers = list(optimizers.values())
        self._parameters = [
            p for optimizer in self._optimizers for group in optimizer.param_groups for p in group["params"]
        ]
        self._clip_norm = clip_norm
        self._scaler = scaler
        self._overflows = 0
        self._unread: list[tuple[int, Tensor, Any]] = []
        self.is_gated = False
        self.left_out: set[int] = set()
        self.on_device = device.type == "cuda" and all(_is_fused(optimizer) for optimizer in self._optimizers)
        self._is_cuda = device.type == "cuda"

    def apply(self, step: int, output: StepOutput, grads_ready: Callable[[], None] | None) -> list[Skip]:
        """Steps the optimizers and clears the gradients.

        Args:
            step: Number of this step, from 1.
            output: What the window computed.
            grads_ready: Called when gradients are complete and unscaled, before clipping.

        Returns:
            Steps now known to have been skipped: this one, or earlier ones.

        Raises:
            NonFiniteError: The loss scaler overflowed 50 times in a row.
        """
        if self._scaler is not None:
            for optimizer in self._optimizers:
                self._scaler.unscale_(optimizer)
        if output.weight is not None:
            gradients = [p.grad for p in self._parameters if p.grad is not None]
            torch._foreach_div_(gradients, output.weight)
        if grads_ready is not None:
            grads_ready()
        checked = output.loss
        if self._clip_norm is not None:
            norm = torch.nn.utils.clip_grad_norm_(self._parameters, self._clip_norm)
            if self._scaler is None:
                checked = checked + norm.to(checked.dtype)
        skipped = self._step(step, checked)
        for optimizer in self._optimizers:
            _clear(optimizer)
        return skipped

    def learned(self, wait: bool) -> list[Skip]:
        """Steps that the device has reported as skipped since the last call.

        Args:
            wait: Whether to wait for the device, as before a save.
        """
        found = []
        while self._unread:
            step, flag, event = self._unread[0]
            if not wait and not event.query():
                break
            event.synchronize()
            if bool(flag):
                found.append(Skip(step, NON_FINITE))
            del self._unread[0]
        return found

    def _step(self, step: int, checked: Tensor) -> list[Skip]:
        if step in self.left_out:
            if self._scaler is not None:
                self._scaler.update()
            return [Skip(step, LEFT_OUT)]
        if self._scaler is not None:
            return self._scaled_step(step, checked)
        if not self.is_gated:
            for optimizer in self._optimizers:
                optimizer.step()
            return []
        if self.on_device:
            self._gated_on_device(step, checked)
            return self.learned(wait=False)
        if not math.isfinite(checked.item()):
            return [Skip(step, NON_FINITE)]
        for optimizer in self._optimizers:
            optimizer.step()
        return []

    def _scaled_step(self, step: int, checked: Tensor) -> list[Skip]:
        scaler = self._scaler
        assert scaler is not None
        if self.is_gated and not math.isfinite(checked.item()):
            scaler.update()
            return [Skip(step, NON_FINITE)]
        before = scaler.get_scale()
        for optimizer in self._optimizers:
            scaler.step(optimizer)
        scaler.update()
        if scaler.get_scale() >= before:
            self._overflows = 0
            return []
        self._overflows += 1
        if self._overflows >= MAX_OVERFLOWS:
            raise NonFiniteError(
                f"fp16 gradients overflowed in {MAX_OVERFLOWS} steps in a row up to step {step}; the loss scale fell to "
                f"{scaler.get_scale():g}. Use trainer.precision=bf16 or a lower learning rate."
            )
        return [Skip(step, OVERFLOW)]

    def _gated_on_device(self, step: int, checked: Tensor) -> None:
        bad = ~torch.isfinite(checked)
        found_inf = bad.to(torch.float32)
        for optimizer in self._optimizers:
            # the hook that torch's own loss scaler uses: fused kernels leave everything unchanged where found_inf is 1
            optimizer.grad_scale, optimizer.found_inf = None, found_inf  # type: ignore[attr-defined]
            try:
                optimizer.step()
            finally:
                del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]
        flag = torch.empty((), dtype=torch.bool, pin_memory=True)
        flag.copy_(bad, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        self._unread.append((step, flag, event))

    def describe(self) -> str | None:
        """What the gate costs here, if anything."""
        if self.is_gated and self._is_cuda and not self.on_device and self._scaler is None:
            return "the finite check waits for the GPU once a step: add optimizer.fused=true to keep it on the device"
        return None


def _clear(optimizer: Optimizer) -> None:
    """`zero_grad(set_to_none=True)`; where torch's own would run, without its profiler range, most of what it costs."""
    if type(optimizer).zero_grad is not Optimizer.zero_grad or "zero_grad" in vars(optimizer):
        optimizer.zero_grad(set_to_none=True)
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None


def _is_fused(optimizer: Optimizer) -> bool:
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False)) and all(
        group.get("fused") for group in optimizer.param_groups
    )
