"""Reading onto a device: nothing is overwritten, used or converted before its copy has arrived."""

from __future__ import annotations

import inspect
import runpy
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from vllm_module import vLLMModule
from vllm_module.errors import WeightReadError
from vllm_module.layers import MergedColumnParallelLinear, RowParallelLinear
from vllm_module.parameters import Reordered, StoredOrder
from vllm_module.quantization import ONLINE, EightBitMethod
from vllm_module.quantization.online import QuantizedRegion
from vllm_module.weights import Checkpoint, open_checkpoint, pieces, read_all, reading, staging
from vllm_module.weights.handle import Destination, Handle
from vllm_module.weights.staging import CudaDevice, StagedReader, Staging

STAND_IN = runpy.run_path(str(Path(__file__).with_name("delayed_device.py")))
DelayedDevice, loading_onto_a_device = STAND_IN["DelayedDevice"], STAND_IN["loading_onto_a_device"]

SHAPES = [(), (0, 3), (5,), (300,), (40, 50), (1, 1, 90), (4, 20, 30)]
PIECE = 256


@pytest.fixture(scope="module")
def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    made = {f"w{index}": torch.randn(shape) for index, shape in enumerate(SHAPES)}
    return made | {"mask": torch.rand(70) < 0.5, "half": torch.randn(30, 40).bfloat16()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tensors: dict[str, torch.Tensor]) -> Path:
    folder = tmp_path_factory.mktemp("staged")
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture
def checkpoint(folder: Path) -> Iterator[Checkpoint]:
    with open_checkpoint(folder) as opened:
        yield opened


@pytest.fixture(params=[1, 4], ids="cpus={}".format)
def device(request: pytest.FixtureRequest) -> Iterator[Any]:
    before = {*threading.enumerate()}  # one of another test may end meanwhile
    with loading_onto_a_device(piece=PIECE, batch=128, cpus=request.param) as device:
        yield device
    assert {*threading.enumerate()} <= before


def jobs(checkpoint: Checkpoint, into: dict[str, torch.Tensor]) -> list[tuple[Handle, Destination]]:
    """Return jobs of every kind; what they shall give is that of ``expected``."""
    into |= {name: torch.full(each.shape, torch.nan) for name, each in checkpoint.items()}
    into["mask"] = torch.empty(70, dtype=torch.bool)
    into |= {
        "cast": torch.empty(40, 50, dtype=torch.float64),
        "column": torch.zeros(40, 64),
        "narrowed": torch.empty(40, 25),
        "turned": torch.empty(50, 40, dtype=torch.bfloat16),
    }
    turned = Reordered(into["turned"], StoredOrder(transposed=True))
    w4 = checkpoint["w4"]
    return [
        *((handle, into[name]) for name, handle in checkpoint.items()),
        (w4, into["cast"]),
        (w4.narrow(1, 10, 30), into["column"][:, 20:50]),
        (w4.narrow(1, 25, 25), into["narrowed"]),
        (w4, turned),
    ]


def expected(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    w4, column = tensors["w4"], torch.zeros(40, 64)
    column[:, 20:50] = w4[:, 10:40]
    made = {
        "cast": w4.double(),
        "column": column,
        "narrowed": w4[:, 25:],
        "turned": w4.T.bfloat16(),
    }
    return tensors | {"half": tensors["half"].float()} | made


def wrong(into: dict[str, torch.Tensor], tensors: dict[str, torch.Tensor]) -> list[str]:
    return [name for name, each in expected(tensors).items() if not torch.equal(into[name], each)]


def test_every_destination_is_filled_in_bounded_memory(device, checkpoint, tensors) -> None:
    """Casts, columns and other orders too; there are two buffers more than threads, and no more."""
    into: dict[str, torch.Tensor] = {}
    for _ in range(3):
        device.pinned_bytes = 0
        read_all(jobs(checkpoint, into))
        assert wrong(into, tensors) == []
        assert device.pinned_bytes == (reading.reader_threads(torch.device("cuda")) + 2) * PIECE


def test_memory_is_written_once_the_caller_has_left_it(device, checkpoint, tensors) -> None:
    """Each destination is allocated when a job is asked for, long after a thread's first read."""
    destinations = [torch.empty(40, 50) for _ in range(12)]
    read_all((checkpoint["w4"], device.caller.allocate(each)) for each in destinations)
    assert all(torch.equal(each, tensors["w4"]) for each in destinations)


@pytest.mark.parametrize(
    ("where", "attribute", "mistake"),
    [
        (STAND_IN["Event"], "synchronize", lambda self: None),
        (Staging, "deliver", lambda self: None),
    ],
    ids=["a buffer is filled again at once", "nobody waits for the copies"],
)
def test_what_is_used_too_early_shows(
    where: type, attribute: str, mistake: Callable[..., None], checkpoint, tensors, monkeypatch
) -> None:
    """The stand-in catches the mistakes that the waits prevent."""
    monkeypatch.setattr(where, attribute, mistake)
    monkeypatch.setattr(Staging, "close", lambda self, failed: None)
    into: dict[str, torch.Tensor] = {}
    with loading_onto_a_device(piece=PIECE, batch=128, cpus=1) as device:
        read_all(jobs(checkpoint, into))
        device.caller.wait_stream = lambda stream: None
    assert wrong(into, tensors) != []


def test_what_is_copied_is_what_the_file_stores(device, checkpoint, monkeypatch) -> None:
    """The host casts nothing and puts nothing in order: bytes travel as they are stored."""
    moved = []
    copy = staging.copy_weight

    def counted(source: torch.Tensor, *args: Any, **more: Any) -> None:
        moved.append(source.nbytes)
        assert source.is_contiguous()
        copy(source, *args, **more)

    monkeypatch.setattr(staging, "copy_weight", counted)
    narrow, wide = torch.empty(30, 40, dtype=torch.float64), torch.empty(30, 40)
    half = checkpoint["half"]
    read_all([(half, narrow), (half.narrow(1, 0, 20), wide[:, :20]), (half, wide)])
    assert sum(moved) == 2 * (1200 + 600 + 1200)
    assert max(moved) <= PIECE


@pytest.mark.parametrize("name", ONLINE)
def test_weights_are_quantized_on_the_device(name: str, tmp_path, monkeypatch) -> None:
    """The conversion gets each weight after its copy, and the bits are those of a load on a CPU."""
    received = []
    receive = QuantizedRegion.receive

    def recorded(self: QuantizedRegion, weight: Any) -> None:
        received.append(isinstance(weight, torch.Tensor) and not weight.isnan().any())
        receive(self, weight)

    monkeypatch.setattr(QuantizedRegion, "receive", recorded)
    layers = []
    for _ in range(2):
        layer = MergedColumnParallelLinear(64, [128, 128], False, shard_names=["a", "b"])
        layer.quantize(EightBitMethod(ONLINE[name]))
        layers.append(layer)
    weights = {n: torch.randn(like.shape) for n, like in layers[0].expected_weights().items()}
    save_file(weights, tmp_path / "model.safetensors")
    layers[0].load_weights(weights)
    received.clear()
    with loading_onto_a_device(piece=PIECE, batch=128) as device, open_checkpoint(tmp_path) as file:
        layers[1].load_weights(file)
    assert received
    assert all(received)
    assert device.conversions == len(received)
    for one, other in zip(layers[0].parameters(), layers[1].parameters(), strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


class Doubling(vLLMModule):
    """Computes from its weight once that is loaded."""

    processes = True

    def __init__(self) -> None:
        super().__init__()
        self.linear = RowParallelLinear(50, 40, bias=False)

    def process_weights_after_loading(self) -> None:
        self.doubled = self.linear.weight.detach() * 2


def test_a_weight_is_processed_once_it_has_arrived(device, checkpoint, tensors) -> None:
    """By the first load, a load again and an update, which keep the memory they write to."""
    model = Doubling()
    pairs = {"linear.weight": checkpoint["w4"]}
    for load in (model.load_weights, model.load_weights, model.update_weights):
        model.doubled = torch.empty(0)
        before = model.linear.weight.data_ptr()
        load(pairs)
        assert torch.equal(model.doubled, tensors["w4"] * 2)
        assert before in (0, model.linear.weight.data_ptr())
        with torch.no_grad():
            model.linear.weight.fill_(torch.nan)
    assert device.copies > 3 * 40 * 50 * 4 // PIECE - 3


def test_a_value_that_a_cast_would_lose_is_refused_by_name(device, tmp_path) -> None:
    """The device finds it, and the message is that of a load on a CPU."""
    save_file({"linear.weight": torch.full((40, 50), 1e30)}, tmp_path / "model.safetensors")
    with torch.device("cpu"), open_checkpoint(tmp_path) as opened:
        model = Doubling()
        model.linear = RowParallelLinear(50, 40, bias=False, params_dtype=torch.float16)
        with pytest.raises(WeightReadError, match=r"linear\.weight .*finite values beyond"):
            model.load_weights(opened)


@pytest.mark.parametrize("fails_at", [1, 5, 12])
def test_a_copy_that_fails_fails_the_load(fails_at: int, device, checkpoint, tensors) -> None:
    """The error is raised as it is, the memory is freed, and the next load succeeds."""
    device.fails_at = fails_at
    model = Doubling()
    pairs = {"linear.weight": checkpoint["w4"]}
    with pytest.raises(RuntimeError, match="illegal memory access"):
        model.load_weights(pairs)
    assert model.linear.weight.is_meta
    model.load_weights(pairs)
    assert torch.equal(model.linear.weight, tensors["w4"])


@pytest.mark.parametrize("error", [WeightReadError("torn"), KeyboardInterrupt()], ids=repr)
def test_a_read_that_fails_leaves_no_copy_behind(error, device, checkpoint, monkeypatch) -> None:
    """Streams are waited for before the load ends, and buffers are given back."""
    taken: list[Any] = []
    take, give_back = Staging.take, Staging.give_back

    def counted_take(self: Staging) -> Any:
        taken.append(take(self))
        return taken[-1]

    def counted_return(self: Staging, buffer: Any) -> None:
        taken.remove(buffer)
        give_back(self, buffer)

    streams: list[Any] = []
    monkeypatch.setattr(Staging, "take", counted_take)
    monkeypatch.setattr(Staging, "give_back", counted_return)
    new_stream = DelayedDevice.new_stream
    monkeypatch.setattr(
        DelayedDevice, "new_stream", lambda self: streams.append(new_stream(self)) or streams[-1]
    )

    class Failing:
        shape, dtype = torch.Size((3,)), torch.float32

        def read_into(self, destination: torch.Tensor) -> None:
            raise error

    with pytest.raises(type(error)):
        read_all([(checkpoint["w4"], torch.empty(40, 50)), (Failing(), torch.empty(3))])
    assert taken == []
    assert streams
    assert all(stream.done == stream.given for stream in streams)


def test_tensors_in_memory_take_the_same_way(device, tensors) -> None:
    """They are copied into pinned memory as they are; the source may change once it is asked on."""
    model = Doubling()

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        bucket = tensors["w4"].bfloat16()
        yield "linear.weight", bucket
        bucket.zero_()

    model.load_weights(stream())
    assert torch.equal(model.doubled, tensors["w4"].bfloat16().float() * 2)
    assert device.copies >= 40 * 50 * 2 // PIECE


def test_a_stream_of_tensors_keeps_its_buffers(device, tensors) -> None:
    """One load has one set of threads and buffers, however many tensors come one by one."""
    model = torch.nn.ModuleList(RowParallelLinear(50, 40, bias=False) for _ in range(6))
    tree = vLLMModule()
    tree.layers = model
    tree.load_weights((f"layers.{index}.weight", tensors["w4"]) for index in range(6))
    assert device.pinned_bytes <= staging.staging_buffers(reading.reader_threads()) * PIECE


def test_a_load_on_a_cpu_is_as_it_was(checkpoint, tensors, monkeypatch) -> None:
    """Without a device nothing is staged, and threads call what reads into host memory directly."""
    monkeypatch.setattr(staging, "StagedReader", None)
    for place in (None, torch.device("cpu")):
        with reading.Readers(place) as readers:
            assert readers._staging is None
            assert readers._read_batch is reading.read_together
            destination = torch.empty(40, 50)
            readers.read([(checkpoint["w4"], destination)])
        assert torch.equal(destination, tensors["w4"])
        assert reading.reader_threads(place) == reading.reader_threads()


def test_what_is_elsewhere_is_read_as_on_a_cpu(checkpoint, tensors) -> None:
    """A model may keep some modules on another device."""
    device = DelayedDevice()
    device.device = torch.device("meta")  # no destination is on it
    into: dict[str, torch.Tensor] = {}
    StagedReader(Staging(device, 1)).read(jobs(checkpoint, into))
    assert wrong(into, tensors) == []
    assert device.pinned_bytes == 0


def test_the_stand_in_has_what_a_device_has() -> None:
    """The methods of the real one are those of the stand-in, with the same parameters."""
    for name, method in inspect.getmembers(CudaDevice, inspect.isfunction):
        if not name.startswith("_"):
            other = inspect.signature(getattr(DelayedDevice, name))
            assert list(inspect.signature(method).parameters) == list(other.parameters), name
    assert pieces.PIECE_BYTES & (pieces.PIECE_BYTES - 1) == 0  # torch rounds pinned memory up
