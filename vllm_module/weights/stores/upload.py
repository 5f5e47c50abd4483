"""Writing a file to a bucket."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from vllm_module.base.messages import printable_name
from vllm_module.errors import CheckpointFormatError, WeightReadError
from vllm_module.weights.formats import SAFETENSORS
from vllm_module.weights.stores.obstore_client import ObstoreClient
from vllm_module.weights.stores.place import BUCKETS, parse, parse_file
from vllm_module.weights.stores.store import Store


@contextmanager
def uploading(url: str) -> Iterator[Path]:
    """Yield the path of a new file on this machine, which is uploaded at the end of the block.

    Nobody sees a part of it in the store. It replaces an object of the same name. The local file is
    among the system's temporary files. After an interrupt, an upload under way may still succeed.

    Raises:
        ValueError: the URL is not that of a file in a bucket; raised before the block.
        OSError: the store does not take the file, though it was tried for a minute.

    """
    folder, name = parse_file(url, SAFETENSORS.suffixes)
    place = parse(folder)
    if place.scheme not in BUCKETS or name is None:
        schemes = ", ".join(f"{each}://bucket/NAME.safetensors" for each in BUCKETS)
        raise ValueError(
            f"{printable_name(url)} cannot be written: expected a path of this machine or {schemes}"
        )
    client = ObstoreClient(place)
    with (
        closing(Store(place, client)) as store,
        TemporaryDirectory(prefix="vllm-module-") as directory,
    ):
        path = Path(directory, name)
        yield path
        try:
            store.persist(lambda: client.write(name, path), name, "it could not be written")
        except (CheckpointFormatError, WeightReadError) as error:  # those of a reader
            raise OSError(str(error)) from error
