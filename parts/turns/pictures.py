"""Pass the pictures of later turns to a frozen vision tower: many at once, and as bytes until they are on its device.

The image processor takes 8 ms of a core for a picture of 448 x 448 pixels, and makes 5 MB of its 600 kB. With the 512
pictures of a step, threads would hold up the sampler for seconds. Instead, a table of what the processor makes of each
pixel value (`PixelTable`) is applied on the tower's device.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from common.records import Prompt
from data import Processor, digest_of
from policy.model import Policy, cache_image_features, vision_parameters

AT_ONCE = 128  # prompts whose pixel values are on the device together


@dataclass(frozen=True)
class PixelTable:
    """What an image processor makes of each value of a pixel, and the patches in which it lays them out."""

    values: Tensor  # (3, 256) float32, of each channel
    patch: int  # side of a patch in pixels
    merge: int  # patches come in squares, one square after the other; this is a square's side in patches
    frames: int  # how often a patch is repeated: a picture is a video of equal frames

    def grid(self, image: Image.Image) -> list[int]:
        """Return the numbers of frames, rows and columns of patches of `image`."""
        return [1, image.height // self.patch, image.width // self.patch]

    def pixel_values(self, image: Image.Image, device: torch.device) -> Tensor:
        """Return the (patches, values) of `image`, as the image processor does, on `device`."""
        pixels = torch.from_numpy(np.array(image)).to(device).long()
        return self._in_patches(self.values.to(device)[torch.arange(3, device=device), pixels])

    def _in_patches(self, pixels: Tensor) -> Tensor:
        """Return (patches, values) of `pixels` (height, width, 3)."""
        squares = pixels.unflatten(0, (-1, self.merge, self.patch)).unflatten(3, (-1, self.merge, self.patch))
        patches = squares.permute(0, 3, 1, 4, 6, 2, 5)[
            :, :, :, :, :, None
        ]  # merged rows, columns; both; channel; pixel
        return patches.expand(*[-1] * 5, self.frames, -1, -1).flatten(4).flatten(0, 3)


def pixel_table(processor: Processor) -> PixelTable | None:
    """Return the table of the image processor of `processor`; None if a table cannot replace it."""
    own = processor.image_processor
    if not all(hasattr(own, name) for name in ("patch_size", "merge_size", "temporal_patch_size")):
        return None
    side = own.patch_size * own.merge_size
    while side * side < 256:
        side *= 2
    table = PixelTable(torch.zeros(3, 256), own.patch_size, own.merge_size, own.temporal_patch_size)
    every = np.arange(side * side).reshape(side, side, 1).repeat(3, 2) % 256
    entries = torch.from_numpy(every + 256 * np.arange(3))
    where = table._in_patches(entries)
    table.values.flatten()[where.flatten()] = processor.vision_inputs([_image(every)])["pixel_values"].flatten()
    sample = _image(np.random.default_rng(0).integers(0, 256, (side, 2 * side, 3)))
    expected = processor.vision_inputs([sample])
    is_right = expected["image_grid_thw"].tolist() == [table.grid(sample)]
    is_right &= torch.equal(expected["pixel_values"], table.pixel_values(sample, torch.device("cpu")))
    return table if is_right else None


def _image(pixels: np.ndarray) -> Image.Image:
    return Image.fromarray(pixels.astype(np.uint8))


def add_vision(prompt: Prompt, processor: Processor, table: PixelTable | None = None) -> None:
    """Add the vision tower's inputs and a hash of the pictures of `prompt`, if it has pictures but no inputs yet.

    With a `table`, the pixel values are left to `add_features`.
    """
    if prompt.images and not prompt.vision:
        prompt.image_digest = digest_of(prompt.images)
        if table:
            prompt.vision = {"image_grid_thw": torch.tensor([*map(table.grid, prompt.images)])}
        else:
            prompt.vision = processor.vision_inputs(prompt.images)


def add_features(policy: Policy, table: PixelTable | None, prompts: Sequence[Prompt]) -> None:
    """Set the `features` of the pictures of `prompts`, with the frozen vision tower of `policy`."""
    device = vision_parameters(policy.model)[0].device
    features: dict[bytes, Tensor] = {}
    for i in range(0, len(prompts), AT_ONCE):
        some = list(prompts[i : i + AT_ONCE])
        for prompt in some if table else ():
            values = torch.cat([table.pixel_values(image, device) for image in prompt.images])
            prompt.vision = {"pixel_values": values, "image_grid_thw": prompt.vision["image_grid_thw"]}
        cache_image_features(policy, some, features)
        for prompt in some if table else ():
            del prompt.vision["pixel_values"]
