"""Arithmetic by name: in which type weights, products and gradients are kept, and by what the loss is scaled."""

from __future__ import annotations

from dataclasses import dataclass

from bigstep.validate import require_name

__all__ = ["PRECISIONS", "Precision", "find_precision"]


@dataclass(frozen=True, kw_only=True)
class Precision:
    """One way to compute; types are named as torch names them."""

    about: str
    """One sentence, for help and documents."""
    weights: str = "float32"
    """Type of weights, optimizer state and batch-norm statistics."""
    products: str = "float32"
    """Type of the products of forward and backward; where it is not that of the weights, autocast chooses them."""
    loss_scale: float = 0.0
    """Factor on the loss at first, so that small gradients do not underflow; 0 for no scaling."""
    growth_interval: int = 2000
    """Steps without overflow after which the scale is doubled; an overflow halves it and drops the step."""
    needs_gpu: bool = False
    """Whether it is refused on a CPU."""

    @property
    def is_mixed(self) -> bool:
        """Whether products have another type than weights."""
        return self.products != self.weights


PRECISIONS: dict[str, Precision] = {
    "float64": Precision(about="double throughout, for proofs", weights="float64", products="float64"),
    "float32": Precision(about="single throughout"),
    "bf16": Precision(about="products in bfloat16, which has float32's range", products="bfloat16"),
    "fp16": Precision(
        about="products in float16, with a scaled loss",
        products="float16",
        # torch's own start of 65,536 overflows at first, and large batches have few steps to waste
        loss_scale=1024.0,
        needs_gpu=True,
    ),
}


def find_precision(name: str) -> Precision:
    """Return which types a run computes in and by what it scales its loss.

    >>> fp16 = find_precision("fp16")
    >>> fp16.weights, fp16.products, fp16.loss_scale
    ('float32', 'float16', 1024.0)
    >>> find_precision("bf16").loss_scale
    0.0
    """
    require_name(name, PRECISIONS, "precision")
    return PRECISIONS[name]
