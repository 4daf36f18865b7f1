"""Single images read by Pillow, with the same pixels as from the decoder of ``graph``.

Pillow alone would clip 16 bits of grey, take CMYK without an Adobe segment for inverted, and follow what XMP says of
the orientation. A test holds the two together over all that ``formats`` admits.
"""

import io
import warnings

import numpy as np
from PIL import Image, ImageChops, ImageOps

from pipeline import formats

_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def read(data: bytes) -> np.ndarray:
    """The upright image in the bytes of a file, uint8 [H,W,3]; ValueError where it is not admitted or damaged."""
    _, _, orientation = formats.parse(formats.Held(data))
    try:
        with warnings.catch_warnings():  # of large images and of odd EXIF blocks
            warnings.simplefilter("ignore")
            return np.asarray(_opened(data, orientation).convert("RGB"))
    except Exception as error:  # Pillow's decoders raise nearly anything on damaged files
        raise ValueError(f"does not decode ({error or type(error).__name__})") from None


def _opened(data, orientation):
    image = Image.open(io.BytesIO(data))
    form, turns = image.format, _UPRIGHT.get(orientation)
    if form == "TIFF":  # newer versions of Pillow turn it while they load it
        image.info.pop("xmp", None)
        image, turns = ImageOps.exif_transpose(image), None
    if image.mode.startswith("I"):  # 16 bits
        image = Image.fromarray(((np.asarray(image).astype(np.uint32) + 128) // 257).astype(np.uint8))
    elif image.mode == "CMYK" and form in ("JPEG", "MPO") and "adobe_transform" not in image.info:
        image = ImageChops.invert(image)
    return image.transpose(turns) if turns is not None else image
