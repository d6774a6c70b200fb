"""PyramidKV: lower layers, whose attention is spread out, keep more of a prompt than upper ones."""

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from kvjax.cache import LayerSpec

from .budget import budget_counts, budget_rows
from .fields import check_fields
from .info import PolicyInfo
from .registry import register
from .snapkv import SnapKV


@register
@dataclasses.dataclass(frozen=True)
class PyramidKV(SnapKV):
    """SnapKV with budgets that fall from layer to layer and have the same total (Cai et al. 2024, section 4).

    Besides the window of w tokens, the numbers of kept tokens form an arithmetic progression over layers. It ends at 1
    / `beta` of the average, and begins accordingly near twice the average. As in the published code, the budgets depend
    on the prompt's length n. A prompt within the budget b is kept whole. A prompt below 2 (b - w) has the same budget
    in all layers. The first layer never keeps more tokens than there are.

    A layer allocates slots for its largest budget over all prompt lengths up to the padded length, because a short prompt
    needs up to b slots in every layer. For batches of long rows only, and for such budgets
    under other policies, see `pyramid`.

    Attributes:
        budget: slots for the prompt in the average layer, window included: tokens, or a fraction of prompt + new
            tokens.
        window, pool, kernel: see `SnapKV`.
        beta: β, the last layer keeps 1 / β of the average besides the window.

    Example:
        >>> policy = kvjax.PyramidKV(budget=64, window=16)
        >>> sizes = params.config, 1, 192, 32  # model, sequences, prompt tokens, new tokens
        >>> held = policy.nbytes(*sizes) / kvjax.Full().nbytes(*sizes)
        >>> str(policy), round(held, 2)  # share of the full cache's bytes
        ('pyramidkv:budget=64,window=16', 0.5)
    """

    about: ClassVar[PolicyInfo] = PolicyInfo(
        name="pyramidkv",
        paper="Cai et al. 2024, PyramidKV: Dynamic KV Cache Compression based on Pyramidal Information Funneling",
        summary="as SnapKV, more in lower layers and less in upper ones",
        memory="freed",
        stage="prompt",
        budget_excludes_new_tokens=True,
    )

    beta: int = 20

    def __post_init__(self) -> None:
        check_fields(self, beta=1)
        super().__post_init__()

    def row_budgets(self, spec: LayerSpec, lengths: Int[Array, " B"], total: Int[Array, " B"]) -> Int[Array, " B"]:
        return self._budgets(spec, lengths, budget_rows(self.budget, total, self.least_slots), jnp)

    def _budgets(self, spec: LayerSpec, lengths: Any, average: Any, numpy: Any) -> Any:
        """`row_budgets` from the average budget of each row, in NumPy or JAX arrays."""
        plain = (lengths <= average) | (lengths < 2 * (average - self.window))
        return numpy.where(plain, average, self._pyramid(spec, lengths, average, numpy))

    def _pyramid(self, spec: LayerSpec, lengths: Any, average: Any, numpy: Any) -> Any:
        """The layer's budget in the progression from the first to the last layer with this average."""
        beside, before = average - self.window, lengths - self.window
        last = beside // self.beta
        first = 2 * beside - last
        over = first >= before
        first, last = numpy.where(over, before, first), numpy.where(over, 2 * beside - before, last)
        return first - spec.layer * ((first - last) // max(spec.num_layers - 1, 1)) + self.window

    def max_budget(self, spec: LayerSpec) -> int:
        if spec.prompt_len == 0:
            return 0
        lengths = np.arange(spec.shortest_prompt, spec.prompt_len + 1)
        total = np.full_like(lengths, spec.max_tokens) if spec.block else lengths + spec.new_tokens
        average = budget_counts(self.budget, total, self.least_slots)
        most = self._budgets(spec, lengths, average, np)
        if isinstance(self.budget, float):
            # A row with fewer new tokens has a lower average, and may use the pyramid where a row with more does not. A
            # layer's share grows with the average, up to the rounding of its steps, one per previous layer.
            most = np.maximum(most, self._pyramid(spec, lengths, average, np) + spec.layer)
        return int(np.max(np.minimum(most, lengths)))
