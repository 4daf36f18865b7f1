"""AdamW with the adaptive clip before it and the momentum network behind it, on flat parameters."""

from typing import Any

import torch
from torch import Tensor

from kernels.update import Rule, State, update_parameters

from .flat import FlatParameters

EPS = 1e-8


class Optimizer:
    """Updates the parameters of ``flat`` and of ``keys``, a momentum network that has those of the first units, and the
    copies of both (``FlatParameters.working`` has to come before).

    ``clip``: "vector" and "norm" are the variants of the average G in ``kernels/update.py``, where the equations stand;
    "off" is no clip. All that a step depends on is on the device, and nothing waits for it.
    """

    def __init__(
        self, flat: FlatParameters, keys: FlatParameters | None, *, betas: tuple[float, float], weight_decay: float,
        clip: str, clip_momentum: float, clip_alpha: float,
    ):  # fmt: skip
        self.flat, self.keys = flat, keys
        self.rule = Rule(*betas, EPS, weight_decay, clip_momentum, clip_alpha)
        new = flat.values.new_zeros
        size = {"off": 0, "norm": len(flat.bounds) - 1, "vector": len(flat.values)}[clip]
        self.state = State(
            values=flat.values, first=new(len(flat.values)), second=new(len(flat.values)), step=new(()),
            average=new(size), keys=new(0) if keys is None else keys.values, copies=flat.copies,
            key_copies=flat.copies[:0] if keys is None else keys.copies,
        )  # fmt: skip
        self.vector = clip == "vector"
        self.clip = Clip(self.state) if size else None
        self.rates = new(2, dtype=torch.float64)

    def set_rates(self, learning_rate: float, momentum: float) -> None:
        """For the steps that follow; ``momentum``: the share of itself that the momentum network keeps."""
        self.rates[0].fill_(learning_rate)  # by kernels: a copy would wait for the device
        self.rates[1].fill_(1 - momentum)

    @torch.no_grad()
    def step(self) -> Tensor:
        """An update by ``flat.gradient``. Returns whether that was finite (on the device): if not, nothing changes."""
        gradient, average = self.flat.gradient, self.state.average
        norms = self.flat.norms(gradient, average) if self.vector else self.flat.norms(gradient)
        finite = update_parameters(self.state, gradient, norms, self.rates, bounds=self.flat.bounds, rule=self.rule)
        for flat in filter(None, (self.flat, self.keys)):
            flat.publish()
        return finite

    def state_dict(self) -> dict[str, Any]:
        """In the form of torch's AdamW of one parameter, ``flat.values``."""
        state, rule = self.state, self.rule
        moments = {"step": state.step, "exp_avg": state.first, "exp_avg_sq": state.second}
        group = {"betas": (rule.beta1, rule.beta2), "eps": rule.eps, "weight_decay": rule.decay, "params": [0]}
        return {"state": {0: moments}, "param_groups": [group]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        moments = state["state"][0]
        self.state.step.copy_(moments["step"])
        self.state.first.copy_(moments["exp_avg"])
        self.state.second.copy_(moments["exp_avg_sq"])


class Clip:
    """What the clip of an optimizer knows of the past."""

    def __init__(self, state: State):
        self.state = state

    def state_dict(self) -> dict[str, Tensor]:
        return {"average": self.state.average}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.state.average.copy_(state["average"])
