"""Stacked experts as peft's ``target_parameters`` writes them: which parameter, which axis order.

``assembly`` asks ``decide`` about all two-dimensional pairs of a file that name no parameter. A
pair of one parameter of E experts is A [E·r, one side] and B [other side, r·E] (``ParamWrapper`` in
peft's ``tuners/lora/layer.py``). Which side is the module's input depends on who wrote it:

* up to 0.18: A has the parameter's first axis after the experts. Models that keep expert weights as
  [out, in] (Mixtral, Qwen, OLMoE, DeepSeek) are swapped, those with [in, out] (GPT-OSS, Llama-4)
  are not.
* 0.19.0 swaps that where the experts' class says ``is_transposed``; 0.19.1 and later where it does
  not. That attribute came with transformers 5, for GPT-OSS; Llama-4's class never has it.

So shapes decide where they can; else the release and the model's way of keeping weights; and where
that depends on the release of transformers too, which no file tells, the adapter is refused unless
its config has ``cupylora_expert_axes``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cupylora.adapters.peft_config import AXES_KEY, IN_OUT, OUT_IN, PeftConfig, Release
from cupylora.adapters.units import Group, Pair, groups_of
from cupylora.errors import AdapterFormatError
from cupylora.shapes import ModelShape, MoeShape

__all__ = ["StackedLayouts", "swapped_by_release"]

_Choice = tuple[Group, bool]
"""A stacked parameter, and whether in and out are swapped."""

_FIRST_TO_ASK, _FIRST_RIGHT = (0, 19, 0), (0, 19, 1)
"""peft releases: the first to look at is_transposed, and the first to do so the right way round."""
_LAST_WITHOUT = (0, 18, 1)
_NEVER_MARKED = ("llama4", "llama4_text")
"""Families with weights [in, out] whose class has no is_transposed in any release."""


def swapped_by_release(release: Release | None, transposed: bool, family: str) -> bool | None:
    """Whether a ``release`` of peft writes in and out swapped for a model; None: not known.

    release: None for those before 0.18 and other tools, which write none. transposed: the model
    keeps expert weights as [in, out].
    """
    if release is None:
        return False if transposed else None
    number = release.number
    if not release.final and _LAST_WITHOUT <= number <= _FIRST_RIGHT:
        return None
    if number < _FIRST_TO_ASK:
        return not transposed
    if not transposed:
        return number < _FIRST_RIGHT
    return number >= _FIRST_RIGHT if family in _NEVER_MARKED else None


class StackedLayouts:
    """Decides for all stacked pairs of a file which parameter each adapts and in which axis order.

    The parameter: by shape, else by nesting, else by the config's target_parameters. The axis
    order, one for the whole file: by the shapes of any pair that has one reading only, then by what
    the config says of it, then by the release.
    """

    def __init__(
        self,
        model: ModelShape,
        moe: MoeShape,
        config: PeftConfig,
        misfit: Callable[[Pair, str], AdapterFormatError],
    ) -> None:
        self.model, self.moe, self.config = model, moe, config
        self.misfit = misfit
        self.groups = groups_of(moe)

    def decide(self, pairs: Sequence[Pair]) -> list[_Choice]:
        """For each pair: the parameter it adapts, and whether in and out are swapped."""
        nested = {pair.key.layer for pair in pairs if pair.key.inner}
        options = [self._options(pair, pair.key.layer in nested) for pair in pairs]
        swapped = self._swapped(pairs, options) if pairs else False
        result = []
        for pair, choices in zip(pairs, options, strict=True):
            group = next((group for group, order in choices if order == swapped), None)
            if group is None:
                raise AdapterFormatError(
                    f"{pair.where}: in and out lie the other way than in other tensors, or than "
                    "its config says; save the adapter again"
                )
            result.append((group, swapped))
        return result

    def _options(self, pair: Pair, nested: bool) -> list[_Choice]:
        experts, (rows, a_width) = self.moe.experts, pair.a.shape
        b_width, columns = pair.b.shape
        features = (a_width, b_width)
        choices = [
            (group, swapped)
            for group in self.groups
            for swapped in (False, True)
            if features == _ordered(group, swapped)
        ]
        if rows != columns or rows % experts or not choices:
            known = ", ".join(f"{g.name} {g.in_features}→{g.out_features}" for g in self.groups)
            raise self.misfit(pair, f"{experts} experts need stacked factors of {known}")
        if len({group.name for group, _ in choices}) > 1:
            hint = self._hint(pair, nested)
            choices = [choice for choice in choices if choice[0].name == hint]
        if not choices:
            raise AdapterFormatError(
                f"{pair.where}: fits both parameters; name one in target_parameters"
            )
        return choices

    def _hint(self, pair: Pair, nested: bool) -> str | None:
        first, second = self.groups
        if nested:
            return first.name if pair.key.inner else second.name
        targets = {name.rpartition(".")[2] for name in self.config.target_parameters}
        named = [group.name for group in self.groups if group.name in targets]
        return named[0] if len(named) == 1 else None

    def _swapped(self, pairs: Sequence[Pair], options: Sequence[Sequence[_Choice]]) -> bool:
        told = {choices[0][1] for choices in options if len({s for _, s in choices}) == 1}
        said = self.config.expert_axes
        if said is not None:
            told.add(said == OUT_IN)
        if len(told) == 2:
            raise AdapterFormatError(
                "its stacked tensors disagree on which axis is in and which is out, among "
                f"themselves or with {AXES_KEY}; correct that, or save the adapter again"
            )
        if told:
            return told.pop()
        swapped = swapped_by_release(
            self.config.release, self.moe.transposed_experts, self.model.family
        )
        if swapped is None:
            raise AdapterFormatError(f"{pairs[0].where}: {self._remedy()}")
        return swapped

    def _remedy(self) -> str:
        """What to do where nothing tells in from out."""
        release = self.config.release
        add = (
            f'add "{AXES_KEY}" to adapter_config.json: "{IN_OUT}" if A has the module\'s inputs, '
            f'"{OUT_IN}" if it has its outputs'
        )
        if release is None:
            return (
                "square, the config has no peft_version and the model's expert weights are not "
                "transposed, so in and out cannot be told apart; add the peft_version that wrote "
                f"it to adapter_config.json, or {add}"
            )
        if not release.final:
            return f"square, and written by a development version of peft; {add}"
        five, four = (IN_OUT, OUT_IN) if release.number >= _FIRST_RIGHT else (OUT_IN, IN_OUT)
        return (
            "square, and this release of peft orders in and out by the release of transformers, "
            f'which no file tells; {add} ("{five}" if it was trained with transformers 5, "{four}" '
            "with 4)"
        )


def _ordered(group: Group, swapped: bool) -> tuple[int, int]:
    """Features of A and of B as the file has them."""
    pair = (group.in_features, group.out_features)
    return pair[::-1] if swapped else pair
