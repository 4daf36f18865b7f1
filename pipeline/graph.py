"""The DALI graph: an image is decoded once, and each view is one resize of a crop, one colour operation and a blur.

The same graph runs on the CPU (``device_id=None``) and, with "mixed" decoding, wholly on a GPU. It draws nothing
itself: every parameter comes with the batch. Facts it relies on (DALI 2.4; the tests hold them):
- a crop with flip is the relative region of interest of ``resize`` with the ends of x swapped. A relative region in
  [0, 1] is safe whatever the size of the image; an absolute one outside of it kills the process. (An image that has
  changed its size since the scan is an error all the same: ``peek_image_shape`` agrees with the index.) Where a crop is
  enlarged, the filter reads the pixel beyond it, as Pillow's resize of a box does and torchvision's crop does not;
- brightness, contrast about the mean, saturation and hue together are an affine map of the colour,
  out = M.rgb + C.mean(rgb). Nothing is clipped in between, so highlights that brightness blows out come back when the
  contrast is lowered. Hue is a rotation about the grey axis; from torchvision's shift in HSV it differs, for a tenth of
  a turn of a photograph, by 4.5 levels in the mean (a rotation in YIQ, as DALI's color_twist has it, by 7.3);
- JPEG (also CMYK, grey, progressive, MPO), PNG, BMP, WebP, TIFF and PNM decode to upright RGB; alpha is dropped, of
  several frames the first is taken, 16 bits are scaled to 8. GIF, AVIF, PFM and a JPEG that lacks even its last two
  bytes are errors. A damaged JPEG 2000 can kill the process, so the index takes none.
"""

import collections
import dataclasses
import errno
import io
import math
import os
import tempfile

import numpy as np
from PIL import Image

from pipeline import formats, headers, objects, waiting
from pipeline.headers import MAY_PASS
from pipeline.latency import Threads

_LUMA = np.array([0.299, 0.587, 0.114])  # ITU-R BT.601, as Pillow and torchvision weigh grey
# Errors of one file alone or, where credentials have expired or a disk is not mounted any more, of all.
UNCLEAR = frozenset({errno.EACCES, errno.EPERM, errno.EKEYEXPIRED, errno.ENOENT})
_AHEAD = 16  # files read at a time, as ``probe`` does
_WIDEST = 300  # pixels: radius of the blur at the largest sigma that an Augmentation takes


class View:
    """A crop, resized. A subclass adds operations, and the arrays that they take."""

    inputs = 0  # arrays that ``apply`` takes

    def feeds(self, drawn, number):
        """These arrays, [m, ...] each, from what was ``drawn`` for view ``number`` of m images."""
        return []

    def apply(self, image, arrays, *, side, gpu_form):
        """The image [side,side,3] after the operations. ``arrays``: an iterator of what ``feeds`` gives, for one image.
        ``gpu_form``: by operators that run on a GPU. Called while the graph is built: an ``if`` on an array becomes a
        condition of the graph."""
        return image


@dataclasses.dataclass(frozen=True)
class Augmented(View):
    """A view of pretraining: colour, then blur, then solarisation. Operations of probability 0 are not built."""

    colour: bool = False
    blur: float = 0.0  # probability: at 1 the operation is unconditional
    solarise: bool = False

    @property
    def inputs(self):
        return 3 * self.colour + (self.blur > 0) + self.solarise

    def feeds(self, drawn, number):
        arrays = []
        if self.colour:
            factors = [v[:, number] for v in (drawn.brightness, drawn.contrast, drawn.saturation, drawn.hue)]
            changed = (factors[0] != 1) | (factors[1] != 1) | (factors[2] != 1) | (factors[3] != 0)
            arrays += [changed, *colour_matrices(*factors)]
        if self.blur:
            arrays.append(np.ascontiguousarray(drawn.blur_sigma[:, number]))  # DALI takes no strides
        if self.solarise:
            arrays.append(np.ascontiguousarray(drawn.solarise[:, number]))
        return arrays

    def apply(self, image, arrays, *, side, gpu_form):
        from nvidia.dali import math as dmath
        from nvidia.dali import types

        if self.colour:
            changed, direct, centre = next(arrays), next(arrays), next(arrays)
            if changed:
                image = _recolour(image, side, direct, centre, gpu_form)
        if self.blur == 1:
            image = _blur(image, next(arrays), gpu_form)
        elif self.blur > 0:
            sigma = next(arrays)
            if sigma > 0:
                image = _blur(image, sigma, gpu_form)
        if self.solarise:
            solarised = next(arrays)
            if solarised:
                image = dmath.min(image, image ^ types.Constant(255, dtype=types.UINT8))  # x ^ 255 is 255 - x
        return image


def region(boxes, flips, sizes):
    """Boxes [m,4] (y, x, h, w) in images of sizes [m,2] as relative regions: start and end, float32 [m,2] each."""
    start, end = boxes[:, :2] / sizes, (boxes[:, :2] + boxes[:, 2:]) / sizes
    swapped = flips[:, None] & np.array([False, True])
    return np.where(swapped, end, start).astype(np.float32), np.where(swapped, start, end).astype(np.float32)


def colour_matrices(brightness, contrast, saturation, hue):
    """The affine colour map out = M.rgb + C.mean(rgb): factors [m] and hue in turns [m] -> M, C float32 [m,3,3].

    Brightness b and contrast c about the mean luma y give b*c*rgb + b*(1-c)*y. Saturation and hue follow; they keep
    greys, so the second term stays as it is.
    """
    columns = brightness, contrast, saturation, 2 * math.pi * hue
    b, c, s, angle = (np.asarray(column, np.float64)[:, None, None] for column in columns)
    saturate = s * np.eye(3) + (1 - s) * _LUMA
    # Rotation about the grey axis (1, 1, 1), from red over yellow to green; a third of a turn permutes the channels.
    cross = np.array([[0, -1, 1], [1, 0, -1], [-1, 1, 0]]) / math.sqrt(3)
    rotate = np.cos(angle) * np.eye(3) + np.sin(angle) * cross + (1 - np.cos(angle)) / 3
    centre = b * (1 - c) * np.broadcast_to(_LUMA, (3, 3))  # the luma of the mean, the same for every channel
    return (b * c * rotate @ saturate).astype(np.float32), centre.astype(np.float32)


def feeds(views, sizes, drawn):
    """Yields the arrays that a graph takes: the sizes [m,2] of the images, then for each view its regions and what it
    takes of what was ``drawn``."""
    yield np.ascontiguousarray(sizes, np.int32)
    for number, view in enumerate(views):
        yield from region(drawn.boxes[:, number], drawn.flips[:, number], sizes)
        yield from view.feeds(drawn, number)


def names(files):
    """Names of files as the graph takes them: uint8 [m, the longest], padded with NUL, which no name holds. A list of
    arrays would take DALI 2.0 ms for 512, this array takes 0.15, in the thread that asks for a batch."""
    encoded = [os.fsencode(file) for file in files]
    return np.array(encoded).view(np.uint8).reshape(len(encoded), -1)


def pipeline(source, views, *, image_size, batch_size, threads, device_id, files=True, gpu_form=None):
    """A DALI pipeline with one uint8 [B,H,W,3] output per view.

    ``source`` yields batches, or is a function that returns one until it raises StopIteration: the ``names`` of the
    files or, without ``files``, a list of their contents (uint8 arrays); then the ``feeds`` of the views.
    ``gpu_form`` picks the operators of colour and blur that run on a GPU (default: on a GPU).
    """
    from nvidia.dali import fn, pipeline_def

    _hush()
    gpu = device_id is not None
    gpu_form = gpu if gpu_form is None else gpu_form
    inputs = 2 + sum(2 + view.inputs for view in views)

    @pipeline_def(batch_size=batch_size, num_threads=threads, device_id=device_id, enable_conditionals=True)
    def graph():
        encoded, size, *arrays = fn.external_source(source=source, num_outputs=inputs, batch=True)
        arrays = iter(arrays)
        if files:  # plain reads: a mapped file that shrinks while it is read kills the process
            encoded = fn.io.file.read(encoded, dont_use_mmap=True)
        decoded = decode(encoded, gpu, size)
        outputs = []
        for view in views:
            start, end = next(arrays), next(arrays)
            size = [image_size, image_size]
            image = fn.resize(decoded, size=size, roi_start=start, roi_end=end, roi_relative=True, antialias=True)
            outputs.append(view.apply(image, arrays, side=image_size, gpu_form=gpu_form))
        return tuple(outputs)

    try:
        return graph()
    except TypeError as error:  # DALI translates what has an "if" into a file, and goes on as it is where it cannot
        if "conditional" not in str(error):
            raise
        raise OSError(
            f"DALI cannot write to {tempfile.gettempdir()}, the folder of temporary files; expected a few kB of room "
            "there, or TMPDIR=FOLDER"
        ) from None


def _recolour(image, side, direct, centre, gpu_form):
    """The affine colour map of an image [side,side,3]: ``direct`` and ``centre`` are M and C of ``colour_matrices``."""
    from nvidia.dali import fn, types

    mean = fn.coord_transform(fn.reductions.mean(image, axes=(0, 1), keep_dims=True), M=centre)
    if gpu_form:  # an operator's argument cannot come from GPU memory
        return fn.cast(fn.coord_transform(image, M=direct, dtype=types.FLOAT) + mean, dtype=types.UINT8)
    # On a CPU coord_transform takes one pixel at a time, filter many. So the three planes become the rows of a picture,
    # with a row of 255 below them, and each channel of the result is a filter of four weights down its columns.
    planes = fn.transpose(fn.reshape(image, shape=[-1, 3], layout="HW"), perm=[1, 0], transpose_layout=False)
    planes = fn.pad(planes, axes=[0], shape=[4], fill_value=255)
    weights = fn.cat(direct, fn.reshape(mean / 255.0, shape=[3, 1]), axis=1)
    rows = [fn.filter(planes, fn.reshape(weights[c], shape=[4, 1]), mode="valid") for c in range(3)]
    mixed = fn.reshape(fn.cat(*rows), shape=[3, side, side], layout="CHW")
    return fn.crop_mirror_normalize(mixed, dtype=types.UINT8, output_layout="HWC")


def _blur(image, sigma, gpu_form):
    """A Gaussian blur by a window that reaches three ``sigma`` (> 0) or a little more to each side."""
    from nvidia.dali import fn

    return fn.gaussian_blur(image, sigma=sigma) if gpu_form else _filtered(image, sigma)


def _filtered(image, sigma):
    """The same but for rounding, by a filter along rows and one along columns: on a CPU in a fifth of the time."""
    from nvidia.dali import fn, types
    from nvidia.dali import math as dmath

    radius = fn.cast(dmath.ceil(3.0 * sigma), dtype=types.INT32)
    places = {"axes": [0], "normalized_anchor": False, "normalized_shape": False}
    offset = fn.slice(np.arange(-_WIDEST, _WIDEST + 1, dtype=np.float32), _WIDEST - radius, 2 * radius + 1, **places)
    scaled = offset / sigma
    weights = dmath.exp(-0.5 * scaled * scaled)
    weights = weights / fn.reductions.sum(weights)
    for shape in ([1, -1], [-1, 1]):
        window = fn.reshape(weights, shape=shape)
        image = fn.filter(image, window.gpu() if image.device == "gpu" else window)
    return image


def decode(encoded, gpu, size=None):
    """The decoding operator: upright RGB, uint8 HWC; an image of another ``size``, int32 [2], is an error."""
    from nvidia.dali import fn, types

    # A header that does not parse must fail before the decoder: there, in a batch of more than four images a thread,
    # DALI 2.4 unwinds while its threads still work on that batch, and the process dies. The decoder waits for what it
    # is fed, so a shape that depends on the header puts the peek first; it costs next to nothing.
    shape = fn.peek_image_shape(encoded)
    readable = shape[0] > 0 if size is None else (shape[0] == size[0]) & (shape[1] == size[1])
    encoded = fn.reshape(encoded, shape=encoded.shape() * fn.cast(readable, dtype=types.INT64))
    # All JPEGs to the decoding engines: an H100 decodes 15,150 images/s so, 8,650 with DALI's default of 0.65.
    device = {"device": "mixed", "hw_decoder_load": 1.0} if gpu else {"device": "cpu"}
    return fn.decoders.image(encoded, output_type=types.RGB, adjust_orientation=True, **device)


def engines(device_id):
    """Whether this GPU has engines that decode (baseline) JPEGs: found out by decoding one with nothing else."""
    from nvidia import nvimgcodec

    picture = io.BytesIO()
    Image.new("RGB", (256, 256)).save(picture, "JPEG")
    try:
        alone = nvimgcodec.Decoder(device_id=device_id, backends=[nvimgcodec.Backend(nvimgcodec.HW_GPU_ONLY)])
        return alone.decode(picture.getvalue()) is not None
    except RuntimeError:
        return False


def probe(images, device_id):
    """Decodes each image alone, as the graph does, if an index would admit it. Yields None for a good one, the reason
    for a bad one, and for one that cannot be read now the OSError, with an ``errno`` of ``MAY_PASS`` or ``UNCLEAR``.

    An image is a path, or a function that returns the file, uint8 [bytes], or raises OSError, or ValueError with the
    reason why it is bad.
    """
    from nvidia.dali import fn, pipeline_def

    @pipeline_def(batch_size=1, num_threads=1, device_id=device_id, prefetch_queue_depth=1)
    def graph():
        encoded, size = (fn.external_source(name=name, batch=True) for name in ("encoded", "size"))
        return decode(encoded, device_id is not None, size)

    _hush()
    alone = graph()
    alone.build()  # what fails in this is no image's fault
    for encoded in _read(images):
        if isinstance(encoded, OSError):
            yield encoded if encoded.errno in MAY_PASS | UNCLEAR else encoded.strerror
            continue
        try:
            if isinstance(encoded, ValueError):
                raise encoded
            alone.run(encoded=[encoded], size=[np.int32(headers.upright(formats.Held(encoded.tobytes())))])
            yield None
        except ValueError as error:
            yield str(error)
        except RuntimeError as error:
            alone = graph()  # nothing promises that a pipeline goes on after an error
            alone.build()
            said = _cause(error)
            # These messages say only that it failed. It was not for want of a GPU's memory: where a decoder fails,
            # nvImageCodec tries the next one, those of the CPU last.
            its_own = "decode" in said or "nvImageCodec failure" in said
            yield "does not decode (truncated or corrupt)" if its_own else f"does not decode ({said})"


def _read(images):
    """Yields the file of each image, or the error, in order. Some are read ahead, as a slow store takes as long for
    several as for one; not all, as each may be large."""

    def result(image):
        try:
            return image() if callable(image) else read(image)
        except (OSError, ValueError) as error:
            return error

    pool, ahead = Threads(_AHEAD), collections.deque()
    try:
        for image in images:
            ahead.append(pool.submit(result, image))
            if len(ahead) == _AHEAD:
                yield waiting.result(ahead.popleft())
        while ahead:
            yield waiting.result(ahead.popleft())
    finally:
        pool.shutdown(cancel_futures=True)


def read(path, offset=0, length=-1):
    """``length`` bytes, or all, of a file or an object from ``offset`` on: uint8 [bytes]; OSError where they cannot be
    read."""
    if path.startswith(objects.SCHEME):
        return objects.get(path, offset, length)
    with open(path, "rb", opener=headers.opened) as file:  # not numpy, for which a file ends where reading it fails
        file.seek(offset)
        return np.frombuffer(file.read(length), np.uint8)


def _hush():
    """Turns off what OpenCV prints of each file that does not decode.

    What nvImageCodec prints of it stays: its level has no value below errors, and the stream that it writes to is that
    of the whole process. Called before a graph is built, not within: DALI would rewrite this function, and log that,
    environment and all.
    """
    os.environ.setdefault("OPENCV_LOG_LEVEL", "OFF")


def _cause(error):
    """The line of a message of DALI that says what went wrong."""
    return str(error).rpartition("encountered:")[2].strip().splitlines()[0].rstrip(" :")
