"""Decoders of image files by name: what turns encoded bytes into pixels, and where."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["DECODERS", "DecoderKind"]


@dataclass(frozen=True, kw_only=True)
class DecoderKind:
    """A way to turn the bytes of image files into crops."""

    about: str
    """What it is."""
    home: str
    """The function that loads a chunk, as `bigstep.data.decoders.base.Decoder` says; for auto, the one that chooses."""
    needs: str = ""
    """The package that it needs besides those that bigstep always needs."""
    on_device: bool = False
    """Whether the device decodes, so that it must be a GPU."""


DECODERS: dict[str, DecoderKind] = {
    "auto": DecoderKind(
        about="Chosen when a run begins: on a GPU by a short measurement, on a CPU Pillow; a note says which and why.",
        home="bigstep.data.decoders.choose:choose",
    ),
    "pillow": DecoderKind(
        about="Pillow in the loader processes, at a half, a quarter or an eighth of the size if that suffices.",
        home="bigstep.data.decoders.pillow:load",
    ),
    "torchvision": DecoderKind(
        about="torchvision's JPEG decoder in the loader processes; files that are not plain JPEG go through Pillow.",
        home="bigstep.data.decoders.turbo:load",
        needs="torchvision",
    ),
    "nvjpeg": DecoderKind(
        about="The GPU's own JPEG decoders, called directly or by torchvision, from files that threads read; files "
        "that are not plain JPEG go through Pillow.",
        home="bigstep.data.decoders.nvjpeg:read",
        needs="torchvision",
        on_device=True,
    ),
    "both": DecoderKind(
        about="The GPU's decoders, and threads that decode the images with which these cannot keep up.",
        home="bigstep.data.decoders.nvjpeg:read",
        needs="torchvision",
        on_device=True,
    ),
}
"""What `data.decoder` may name."""
