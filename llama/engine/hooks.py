"""Whether a model has forward hooks, for runners that compute without calling its modules.

A hook sees or changes what a module computes (study/inside.py). The operations of cpp/, a compiled step, a CUDA graph
and the Triton kernels call no modules. So their runners ask before each pass, and run module by module if there are
hooks.
"""

from __future__ import annotations

import logging

from torch import nn
from torch.nn.modules import module as nn_module
from torch.utils.hooks import RemovableHandle

LOG = logging.getLogger(__name__)


class HookWatch:
    """Called with a model, returns whether it has forward hooks. The first time that it has, one line is logged.

    PyTorch numbers all hooks of a process. While no hook was added, a model without hooks is not searched again, so
    that a call takes less than a microsecond.

    instead  what does not run while there are hooks, for the line
    rounds   whether logits then differ in rounding from those of a run without hooks; the line is then a warning
    """

    def __init__(self, instead: str, rounds: bool):
        self.instead, self.rounds = instead, rounds
        # The number of the next hook when the model was searched last, and what was found. One tuple, so that two
        # threads never leave the number of one search with the result of another.
        self._state: tuple[int | None, bool] = None, False
        self._logged = False

    def __call__(self, model: nn.Module) -> bool:
        searched, found = self._state
        if found:  # it may have been removed, which changes no number
            searched = None
        while searched != RemovableHandle.next_id:  # again if a hook was added during the search
            searched = RemovableHandle.next_id
            found = has_hooks(model)
            self._state = searched, found
        if found and not self._logged:
            self._logged = True
            LOG.log(
                logging.WARNING if self.rounds else logging.INFO,
                "clearllama: the model has forward hooks, so it runs module by module, without %s%s",
                self.instead,
                "; its logits differ in rounding from those of a run without hooks" if self.rounds else "",
            )
        return found


def has_hooks(model: nn.Module) -> bool:
    """Whether a forward hook is registered on a module of the model, or on all modules of the process."""
    if nn_module._global_forward_hooks or nn_module._global_forward_pre_hooks:
        return True
    return any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
