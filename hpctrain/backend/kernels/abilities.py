"""Abilities of operators beyond `Operator`: classes to inherit from, each for one thing, none of them required.

Without any of these a plan works too: it takes more memory, or waits where it could compute. A plan asks an operator for them
once, when it is made; a step hardly asks at all.
"""

from __future__ import annotations

from hpctrain.backend.arithmetic import Arithmetic
from hpctrain.backend.host_arithmetic import HostArithmetic
from hpctrain.backend.operators import Operator


class AnyArrays:
    """The operator computes by the arithmetic service alone, so it runs wherever the arrays of a kernel set lie.

    It is the specs that bring their own operators (see `nn.compile.steps`) that may need it: they know no kernel set.

    arithmetic: the service, that of the host until another one is given.
    """

    arithmetic: Arithmetic = HostArithmetic()

    def use(self, arithmetic: Arithmetic) -> None:
        """Compute by this service. Called before `bind`."""
        self.arithmetic = arithmetic


class InPlace:
    """The output may lie in the very buffer of inputs[0], and input_grads[0] in that of output_grad; the plan decides.

    Forward must bear that, element by element, and so must backward. Saves an activation and a gradient.
    """


class InputView:
    """The output is inputs[0]'s memory under another shape, its gradient too; forward and backward do nothing.

    Where the input has other readers as well its gradient is a sum, and the program copies the output's gradient to it.
    """


class Accumulating:
    """`backward_input` adds to input_grads[i] where `Buffers.accumulate[i]` is set. Saves a partial gradient, and adding it."""


class OutputReadOnce:
    """Only the first of the two halves of backward reads the output (`needs_output`), so it is free during the second.

    So it is for a mask that is applied to the output's gradient before both.
    """


class JointBackward:
    """`backward_parameters` writes the inputs' gradients too, and a `backward_input` behind it does nothing.

    The plan then reserves these gradients one action earlier.
    """


class DeferredStart:
    """Work that takes time without computing (a message) may start before it has to be complete.

    begins_early: `begin_forward` is called at the operator's place, `forward` just before its first reader; else only `forward`.
    """

    begins_early: bool = False

    def begin_forward(self) -> None:
        """The input is complete and stays so until `forward`, which follows later. Must not wait."""
        raise NotImplementedError

    def begin_backward(self) -> None:
        """The output's gradient is complete, `backward_input` follows later. Must not wait. Called or not, as the plan likes."""
        raise NotImplementedError


class RecomputedOutput:
    """The output need not be kept from forward to backward: it is made again there, if anybody reads it.

    recomputes_output: whether that is worth it at these shapes.
    """

    recomputes_output: bool = True

    def recompute_output(self) -> None:
        """Write the output again, from inputs[0] and what was saved."""
        raise NotImplementedError


class SufficientFactors:
    """The weight's gradient is x^T dy of inputs[0] (N, in) and output_grad (N, out), the bias's the sum of dy over N.

    So an averager may send x and dy instead (Xie et al. 2015), and compute the gradients in place of `backward_parameters`.
    """

    def finish_output_grad(self) -> None:
        """Make output_grad the gradient of the linear map's own output: that of an activation fused behind it is applied."""


class ParameterCopies:
    """The operator keeps copies of parameters, in a format of its own, from one evaluation to the next."""

    def parameters_changed(self) -> None:
        """Parameter values differ from the last forward's: the copies are stale."""
        raise NotImplementedError


class FollowsOperator:
    """Where several programs run side by side, copies of parameters that the first one's operator makes may serve the others'."""

    def follow(self, first: Operator) -> None:
        """Announce before `bind` that each call follows the same call of `first`.

        `first` is an operator of the same spec with the same parameters. Between its call and that of this operator it is not
        called again, and nothing else writes to the arrays that it is bound to.
        """
        raise NotImplementedError


class CallsHost:
    """Its calls may ask the host in between: for numbers of other ranks. Such a call waits, and is never captured.

    calls_host: whether they do, once it is bound.
    """

    calls_host: bool = True
