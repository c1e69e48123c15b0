"""The part of a configuration that names the training data and what is done with them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from bigstep.errors import require
from bigstep.tables.decoders import DECODERS
from bigstep.tables.vocabularies import VOCABULARIES
from bigstep.validate import Count, Fraction, NotNegative, Range, WholeNotNegative, check_ranges, require_name

__all__ = ["DataConfig", "Resize"]

Share = Annotated[float, Range(lambda value: 0 < value <= 1, "be above 0 and at most 1")]


@dataclass(frozen=True, kw_only=True)
class Resize:
    """Progressive resizing: from `epoch` on, train on images of `image_size`."""

    epoch: NotNegative
    """The first epoch at this size."""
    image_size: Count
    """Side of the training crop in pixels."""
    min_scale: Share = 0.08
    """Smallest area of a random resized crop, as a fraction of the image."""

    def __post_init__(self) -> None:
        check_ranges(self, "data.sizes")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Which images, how large, how augmented; or which text, and how it is divided."""

    name: str = "embedded"
    """A name that `bigstep data` knows (embedded, cifar10, folder, shakespeare, …), or package.module:function."""
    path: str = ""
    """Where the files lie; empty means the cache folder (and a download if the set allows it)."""
    image_size: WholeNotNegative = 0
    """Side of the images in pixels; 0 keeps the size of the set."""
    augment: Literal["none", "flip", "crop_flip", "crop_alternate", "resized_crop"] = "none"
    """Augmentation of training images, decided by (seed, epoch, sample), never by the rank."""
    shift: WholeNotNegative = 4
    """Largest shift of crop_flip and crop_alternate in pixels; crop_alternate mirrors an image every other epoch."""
    sizes: tuple[Resize, ...] = ()
    """Progressive resizing, as a list of {epoch, image_size, min_scale}; empty for a constant size."""
    rectangular: bool = False
    """Evaluate folders on whole images in batches of similar aspect ratio instead of square centre crops."""
    drop_last: bool = False
    """Leave out the incomplete last batch of each epoch; otherwise its step counts in proportion to its samples."""
    holdout: Fraction = 0.0
    """Fraction of the training set kept out of training and used for evaluation instead of the test set."""
    loaders: WholeNotNegative = 2
    """Processes per rank that decode the images of a folder, or threads that read them if the GPU decodes; sets held in
    memory need none."""
    decoder: str = "auto"
    """What decodes image files: {decoders}; which part of an image is cropped does not depend on it."""
    length: Count = 128
    """Tokens in a sequence of text."""
    vocabulary: str = "bytes"
    """How text is divided into tokens: bytes, chars, words or words:SIZE, tiktoken:NAME, tokenizers:PATH."""

    def __post_init__(self) -> None:
        check_ranges(self, "data")
        require_name(self.vocabulary.partition(":")[0], VOCABULARIES, "data.vocabulary")
        require_name(self.decoder, DECODERS, "data.decoder")
        epochs = [size.epoch for size in self.sizes]
        require(
            epochs == sorted(set(epochs)),
            f"data.sizes must be listed by rising epoch, but the epochs are {epochs}.",
        )
