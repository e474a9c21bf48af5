"""Images in prompts: which a row has, and how they are read.

They stay compressed, as files have them, on their way to engines and trainers, which decode them.
"""

import hashlib
import io
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from .errors import TaskError

PLACE = {"type": "image"}  # a part of a message: the row's next image
PART_TYPES = ("image", "image_url")  # of parts that are, or stand for, an image
SIZES = ("min_pixels", "max_pixels", "resized_height", "resized_width")  # of a part that qwen-vl-utils reads
WHITE = 2**16 - 1  # of 16 bits


@dataclass(frozen=True)
class Images:
    """A row's images, in the order of its prompt: addresses, or the contents of files. Errors name its `origin`."""

    files: tuple[str | bytes, ...]
    origin: str

    def read(self) -> "Images":
        """These images as contents of files. Raises TaskError if one cannot be read."""
        return replace(self, files=tuple(file if isinstance(file, bytes) else self._read(file) for file in self.files))

    def decoded(self) -> list:
        """These images as PIL.Image.Images in RGB. Raises TaskError if one cannot be read."""
        return [self._opened(file, _rgb) for file in self.read().files]

    def sizes(self) -> list[tuple[int, int]]:
        """The width and height of each image in pixels, but for URLs. Raises TaskError if an image is not there or is
        none, as its first bytes show."""
        here = [file for file in self.files if isinstance(file, bytes) or not ("://" in file or file[:5] == "data:")]
        return [self._opened(file, lambda image: image.size) for file in here]

    @cached_property
    def key(self) -> bytes:
        """Equal for equal images."""
        files = (file if isinstance(file, bytes) else file.encode(errors="surrogatepass") for file in self.files)
        return hashlib.blake2b(b"".join(hashlib.blake2b(file).digest() for file in files)).digest()

    def _read(self, address: str) -> bytes:
        import fsspec

        try:
            with fsspec.open(address) as file:
                return file.read()
        except Exception as error:  # which errors there are depends on the address
            raise _unreadable(self.origin, address, error) from error

    def _opened(self, file: str | bytes, use: Callable):
        """What `use` makes of an opened image, whose pixels PIL reads only if they are used."""
        from PIL import Image

        try:
            with Image.open(io.BytesIO(file) if isinstance(file, bytes) else file) as image:
                return use(image)
        except Exception as error:  # which errors there are depends on the decoder
            raise _unreadable(self.origin, file, error) from error


class ImagesOfCompletions(Sequence):
    """For each completion, its prompt's images: a list of PIL.Image.Images, in RGB; None for a prompt without. They are
    decoded, once for a prompt, if somebody takes them, and are copies each time."""

    def __init__(self, images: list["Images | None"]):
        self.images, self.decoded = images, {}

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index):
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[index]]
        if not (images := self.images[index]):  # a dataset may have an empty list there
            return None
        if images.key not in self.decoded:
            self.decoded[images.key] = images.decoded()
        return [image.copy() for image in self.decoded[images.key]]


def take_images(record: dict, origin: str) -> tuple[list[dict], Images | None]:
    """The messages of a row, with `PLACE` for each image, and its images.

    A row has them in the columns `images` and `image`, as for TRL, or in the parts of its messages. If no message has a
    place for those of a column, the first of the user begins with them. Raises TaskError if there are more places or
    fewer, or as `Images.sizes` does.
    """
    columns = [record[name] for name in ("images", "image") if record.get(name)]
    given = [image for column in columns for image in (column if isinstance(column, list) else [column])]
    messages, placed, places, rest = [], [], 0, iter(given)
    for message in record["prompt"]:
        if isinstance(content := message.get("content"), list):
            own = [_own(part, origin) for part in content if part["type"] in PART_TYPES]
            places += own.count(None)
            placed += [next(rest, None) if image is None else image for image in own]
            content = [PLACE if part["type"] in PART_TYPES else part for part in content]
        messages.append(message if content is None else message | {"content": content})
    if given and not placed:
        number = next((i for i, message in enumerate(messages) if message["role"] == "user"), 0)
        text = messages[number].get("content") or ""
        parts = text if isinstance(text, list) else [{"type": "text", "text": text}]
        messages[number] = messages[number] | {"content": [PLACE] * len(given) + parts}
        placed, places = given, len(given)
    if places != len(given):
        raise TaskError(f"{origin}: {len(given)} images, and messages with places for {places}")
    if not placed:
        return messages, None
    images = Images(tuple(_file(image, origin) for image in placed), origin)
    images.sizes()
    return messages, images


def _own(part: dict, origin: str):
    """The image that a part has; None if it stands for the column's next one."""
    if sizes := [name for name in SIZES if part.get(name)]:
        raise TaskError(
            f"{origin}: {' and '.join(sizes)} of an image would not count: the model's processor has one setting for"
            " all, and --map can resize an image"
        )
    return next((part[name] for name in (part["type"], "url", "path") if part.get(name)), None)


def _file(image, origin: str) -> str | bytes:
    """An image, in whatever form a row has it, as an address or as a file's content."""
    if isinstance(image, dict):  # of a part's "image_url", or of a column of `datasets`
        image = image.get("url") or image.get("bytes") or image.get("path")
    if isinstance(image, os.PathLike):
        image = os.fspath(image)
    if hasattr(image, "save"):  # a PIL.Image.Image
        file = io.BytesIO()
        try:
            _rgb(image).save(file, "PNG")
        except Exception as error:  # its file is opened, but not read
            raise _unreadable(origin, file.getvalue(), error) from error
        return file.getvalue()
    if not isinstance(image, (str, bytes)):
        raise TaskError(f"{origin}: {image!r} is no image: neither an address, nor a file's content, nor PIL's")
    return image


def _rgb(image):
    """The PIL.Image.Image as a viewer shows it, in RGB: turned as its EXIF tag says, and on white where it is
    transparent, as for vLLM. Raises ValueError if its mode does not say which pixels are white."""
    from PIL import Image, ImageOps

    image = ImageOps.exif_transpose(image)
    if image.mode.startswith(("I", "F")):
        integers = image.convert("I")
        if image.mode == "F" or integers.getextrema()[1] > WHITE:
            raise ValueError(f"which pixels are white in mode {image.mode}? Save it with 8 or 16 bits")
        image = integers.point(lambda pixel: pixel / 256)  # `convert` would make all that is above 255 white
    if image.has_transparency_data:
        image = image.convert("RGBA")
        opaque = Image.new("RGB", image.size, "white")
        opaque.paste(image, mask=image.getchannel("A"))
        return opaque
    return image.convert("RGB")


def _unreadable(origin: str, file: str | bytes, error: Exception) -> TaskError:
    name = f"the image {file[:200]}" if isinstance(file, str) else "an image"
    return TaskError(f"{origin}: {name} cannot be read: {type(error).__name__}: {error}")
