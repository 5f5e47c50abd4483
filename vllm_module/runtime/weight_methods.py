"""Methods of ``LLM`` on the weights of a running engine: updates, serving, sleep, digests."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from vllm_module.base.messages import describe_error, shorten
from vllm_module.cooperative import SentBoxes
from vllm_module.core.digests import ModelDigest, digest_of
from vllm_module.errors import ModelNotReadyError
from vllm_module.hf_config import read_entries
from vllm_module.layout import Layout, layout_of_stages
from vllm_module.runtime.arguments import check_type, known_arguments
from vllm_module.runtime.cache.kv_cache import has_stored_scales
from vllm_module.runtime.engine import Engine
from vllm_module.runtime.expected_digests import update_and_compare
from vllm_module.runtime.planned_layout import check_target, planned_layout
from vllm_module.runtime.ranks.executor import Executor
from vllm_module.runtime.ranks.worker_weights import SLEEPING
from vllm_module.weights import Weight
from vllm_module.weights.digests import is_part
from vllm_module.weights.handle import Pairs
from vllm_module.weights.update_file import WeightUpdate

if TYPE_CHECKING:
    from vllm_module.build.model_source import ModelSource
    from vllm_module.runtime.replica import WeightServer

_T = TypeVar("_T")


class WeightMethods:
    """The methods of :class:`~vllm_module.LLM` that change weights between two steps."""

    engine: Engine
    executor: Executor
    source: ModelSource

    def update_weights(
        self,
        weights: Mapping[str, Weight] | Iterable[tuple[str, Weight]] | SentBoxes,
        *,
        digests: Mapping[str, str] | None = None,
        weight_version: str | None = None,
    ) -> None:
        """Update weights of the running model in place, between two steps.

        Running requests keep the keys and values that are already computed; those of a model with
        states start over if steps are in flight (async scheduling, pipeline stages), and those of
        an 8-bit cache whose scales the checkpoint stores: an update may change them. One that
        is refused before anything was written changes nothing, and requests continue. If it fails
        later, they end with the reason as their ``error``, and new requests are refused until an
        update brings a whole checkpoint, or :meth:`reload_weights` succeeds.

        An engine that sleeps at level 2 needs a whole checkpoint, and is awake afterwards.

        ``digests`` are those that tensors should have afterwards, by the names of :meth:`digest` or
        other names that a checkpoint may have for them. A tensor that is quantized or cast may have
        that of what was sent, in the dtype in which it was sent, or that of what the engine holds.
        Only named tensors are looked at. If one has another digest, the engine refuses to run, as
        after an update that failed. Nothing is written if the model has no tensor of a name, or if
        one that a mapping does not send has another digest than the engine's.

        ``weight_version`` names the weights from now on. Without one, versions are counted: ``"1"``
        comes after ``"0"``, and ``"a+1"`` after ``"a"``. Samples list the versions of their tokens.
        One that ``open_update`` has opened brings its own name and digests.

        In place of weights, ``vllm_module.cooperative.SentBoxes`` says where each rank of the
        engine meets those of a trainer, which send it what it keeps.

        Raises:
            ValueError: ``weights`` have no names, a plan of boxes is to another layout than the
                engine's, or the model lacks a tensor that ``digests`` name.
            WeightLoadError: the model refuses the weights.
            WeightReadError: a tensor has another digest, an iterator lost touch with the trainer
                that it receives from, or an update is for weights of another version.
            ModelNotReadyError: the engine sleeps, and has its weights in host memory.

        """
        expected = "names with tensors, or SentBoxes (open_update opens a file or folder)"
        check_type("weights", weights, expected, Mapping, Iterable, SentBoxes)
        check_type("weight_version", weight_version, "text or None", str, type(None))
        check_type("digests", digests, "digests by name, or None", Mapping, type(None))
        for name, digest in (digests or {}).items():
            if not isinstance(name, str) or not is_part({name: digest}):
                raise ValueError(
                    f"the digest of {shorten(name)} should be text of 32 hexadecimal digits, as "
                    f"digest().tensors has them, got {shorten(digest)}"
                )
        with self._changing():
            self.executor.check()
            if isinstance(weights, SentBoxes):
                check_target(weights.plan.target, self._layout)
            if self.executor.asleep == 1 and "weights" in self.executor.sleeping:
                raise ModelNotReadyError("the engine sleeps: wake_up() first")
            if isinstance(weights, WeightUpdate):
                weight_version = weights.name_after(self.weight_version, weight_version)
                digests = digests or weights.digests or None
            self._update_named("an update of the weights", weights, digests, weight_version)

    def _update_named(
        self,
        what: str,
        weights: Pairs | SentBoxes,
        digests: Mapping[str, str] | None = None,
        version: str | None = None,
    ) -> None:
        self._change(what, self._update, weights, digests)
        self._name_weights(version)

    def _update(self, weights: Pairs | SentBoxes, digests: Mapping[str, str] | None) -> None:
        if digests is None:
            self.executor.update_weights(weights)
        else:
            update_and_compare(self.executor, weights, digests)

    def _digest(self) -> ModelDigest:
        return sum(self.executor.apply_model(digest_of), start=ModelDigest())

    def serve_weights(
        self, host: str = "127.0.0.1", port: int = 0, *, token: str | None = None
    ) -> WeightServer:
        """Serve the weights of this engine, from which others load, while it goes on.

        Another engine, of any number of ranks and quantized or not, is started by
        ``LLM(server.url)`` with the token in ``VLLM_MODULE_REPLICA_TOKEN``. Bytes are of one
        version: a load across an update fails, and says that the file has changed. On a CPU each
        rank that this engine has started sends what it holds beside the steps, on a port of its
        own; what others hold is copied between two steps. What is sent is not encrypted.

        Args:
            host, port: to listen on; port 0 for any.
            token: what clients have to know; by default one is made.

        Returns:
            The server, with ``url`` and ``token``; call its ``close()``, or use it as a context.

        Raises:
            UnsupportedModelError: weights are not held as a checkpoint stores them, because they
                were quantized while they were loaded, or engines share experts.
            ValueError: each rank makes the calls (``external_launcher``), and none can ask others.
            RuntimeError: the engine sleeps, or an update of its weights had failed.
            OSError: the host is not this machine's, or the port is taken.
            RankError: another rank cannot listen; no server of this call goes on.

        """
        from vllm_module.runtime.held_file import HeldBoxes, HeldFile, ServedFile  # few need it
        from vllm_module.runtime.rank_servers import end_boxes, serve_boxes
        from vllm_module.runtime.replica import MODEL, RANKS, WeightServer, small_files

        self.executor.alone("serve_weights")
        if self.executor.every_rank_calls:
            raise ValueError(
                "a server asks all ranks for weights when a client comes, and with "
                "distributed_executor_backend='external_launcher' a rank cannot ask others: make "
                "an engine with 'mp', which starts ranks"
            )
        check_type("token", token, "text or None", str, type(None))
        if token is not None and (len(token) < 8 or not token.isascii() or not token.isprintable()):
            raise ValueError("token should be eight printable ASCII characters or more")
        token = secrets.token_urlsafe(24) if token is None else token

        executor = self.executor
        # A step reads weights, too. On a device it would wait for copies, and other ranks for it.
        on_cpu = executor.worker.device.type == "cpu"
        small = small_files(self.source.folder)
        if overrides := self.source.overrides:  # the reader's model is this one
            small["config.json"] = json.dumps(read_entries(self.source.folder, overrides)).encode()
        with self.engine.alone():
            beside_steps = executor.size == 1 and on_cpu
            file = HeldFile(executor.apply_model, self._check_whole, beside_steps)
        files: dict[str, ServedFile] = {MODEL: file}
        boxes = f"rank-{secrets.token_hex(8)}.safetensors"  # what no other server has

        def close() -> None:
            if boxes in files and executor.end is None:
                # A rank that has ended has no server, and the engine says so elsewhere.
                with self.engine.alone(), suppress(RuntimeError):
                    executor.collective_rpc(end_boxes, args=(boxes,))

        server = WeightServer(files, small, self.engine, host, port, token, close)
        if executor.size > 1 and executor.started_ranks and on_cpu:
            try:
                with self.engine.alone():
                    files[boxes] = HeldBoxes(executor.worker.model, self._check_whole)
                    ports = executor.collective_rpc(serve_boxes, args=(boxes, host, token))
            except BaseException:
                server.close()
                raise
            small[RANKS] = json.dumps({"file": boxes, "ports": ports[1:]}).encode()
        return server

    def sleep(self, level: int = 1, **options: Any) -> None:
        """Free the memory of the weights and the KV cache, until :meth:`wake_up`.

        Does nothing if the engine sleeps at this level.

        Args:
            level: 1 copies the weights to host memory, from which the engine wakes up; on a CPU
                they stay in place. 2 drops them.
            options: ``mode`` of vLLM, with any value: a sleeping engine has no requests.

        Raises:
            RuntimeError: there are requests, or the engine sleeps at another level or in part.
            MemoryError: host memory is too small for the weights.
            ModelNotReadyError: the level is 1, and an update of the weights had failed midway.

        """
        known_arguments("LLM.sleep", options, (), {"mode": (...,)})
        if isinstance(level, bool) or level not in (1, 2):
            raise ValueError(f"level should be 1 or 2, got {shorten(level)}")
        with self._changing():
            self.executor.check()
            if self.engine.requests:
                raise RuntimeError(f"{len(self.engine.requests)} requests are going on")
            if self.executor.asleep:
                if self.executor.asleep == level and self.executor.sleeping == {*SLEEPING}:
                    return
                raise RuntimeError("the engine sleeps already: wake_up() first")
            self.executor.sleep(level)
            self.engine.fail("the engine sleeps: wake_up() first")

    def wake_up(self, tags: Collection[str] | None = None) -> None:
        """Restore the weights of a sleeping engine, allocate the KV cache, and accept requests.

        Weights dropped at level 2 are loaded from the model's folder again, if no update had
        changed them and the folder has not changed since. Does nothing if the engine is awake.

        Args:
            tags: ``["weights"]`` to have the weights first, and the KV cache by ``["kv_cache"]``
                when they have been updated, so that there is memory for two copies of them; by
                default both. ``["weights"]`` at level 2 is for weights that exist nowhere any more,
                too: then the next update has to be a whole checkpoint.

        Raises:
            ModelNotReadyError: those weights exist nowhere any more, an update of the weights had
                failed midway, or the KV cache is to wake up before the weights.

        """
        if tags is not None:
            check_type("tags", tags, f"a list of {' and '.join(SLEEPING)}", list, tuple, set)
            if unknown := [tag for tag in tags if tag not in SLEEPING]:
                raise ValueError(f"tags should be of {SLEEPING}, got {shorten(unknown[0])}")
        with self._changing():
            self.executor.check()
            asleep = self.executor.sleeping
            wanted = asleep.intersection(SLEEPING if tags is None else tags)
            if wanted == {"kv_cache"} and "weights" in asleep:
                raise ModelNotReadyError(
                    "the weights sleep, and the KV cache wakes up after them: wake_up(tags="
                    "['weights']) first, and send their update if they were dropped"
                )
            if self.executor.refusal is not None and (wanted == {"kv_cache"} or not asleep):
                raise ModelNotReadyError(
                    "waking up repairs no update: update_weights with a whole checkpoint, or "
                    f"reload_weights(): {self.executor.refusal}"
                )
            if wanted:
                self._change("waking up", self.executor.wake_up, wanted)

    def reload_weights(self) -> None:
        """Load the weights in the model's folder again, as they are now.

        Updates since the first load are lost. A sleeping engine wakes up, and one with a failed
        update is repaired. The version of the weights is counted. Raises the errors of loading.
        """
        with self._changing():
            self.executor.check()
            self._change("reloading the weights", self.executor.reload_weights)
            self._name_weights(None)

    @property
    def weight_version(self) -> str:
        """Name of the weights: that of the last update, or its number; ``"0"`` before the first."""
        return self.engine.weight_version

    def _name_weights(self, version: str | None) -> None:
        """Name the weights after they have changed; without a name, count."""
        if version is None:
            head, plus, number = self.engine.weight_version.rpartition("+")
            counts = number.isascii() and number.isdecimal()
            version = f"{head}{plus}{int(number) + 1}" if counts else f"{head}{plus}{number}+1"
        self.engine.weight_version = version

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Evict all cached pages, so that later prompts reuse none; return ``True``.

        Running requests continue, whatever the arguments of vLLM are.
        """
        del reset_running_requests, reset_connector
        with self.engine.alone():
            self.executor.check()
            self.engine.scheduler.reset_prefix_cache()
        return True

    def digest(self) -> ModelDigest:
        """Return for each tensor a number that no layout changes: the same on any ranks.

        Names are those of :meth:`vLLMModule.expected_weights`, and digests those that ``vllm-module
        digest`` prints of a checkpoint of the same dtypes.
        """
        self.executor.alone("digest")
        with self.engine.alone():
            return self._digest()

    def layout(self, source: Layout | None = None) -> Layout:
        """Return where the engine's ranks keep each tensor of a checkpoint, for a transfer plan.

        With a trainer's layout as ``source`` it is where they keep the tensors of the source, which
        may have fused what the checkpoint has apart. Raises ``WeightLoadError`` if a load of these
        would be refused (``RankError`` if another stage's rank refuses it).
        """
        with self.engine.alone():
            return self._layout(source)

    def _layout(self, source: Layout | None = None) -> Layout:
        self.executor.alone("layout")
        stages, size = self.executor.stages, self.executor.size // self.executor.stages
        handles = None if source is None else source.handles()
        of_stage = partial(planned_layout, ranks=size, source=handles)
        if stages == 1:
            return of_stage(self.executor.worker.model)
        found = self.executor.apply_model(of_stage)
        return layout_of_stages(found[::size])  # in the order of ranks, the last stage first

    def _check_whole(self) -> None:
        """Raise if the ranks do not have whole weights now."""
        self.executor.check()
        if "weights" in self.executor.sleeping:
            raise ModelNotReadyError("the engine sleeps: wake_up() first")
        if self.executor.refusal is not None:
            raise ModelNotReadyError(self.executor.refusal)

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Hold the engine between two steps; who reads weights beside steps finds the change."""
        with self.engine.alone(), self.engine.weights_lock:
            self.engine.weight_changes += 1
            yield

    def _change(self, what: str, change: Callable[..., None], *arguments: Any) -> None:
        try:
            change(*arguments)
        except BaseException as error:
            if not self.executor.can_run:
                self.engine.fail(f"{what} failed: {describe_error(error)}")
            raise
        if self.executor.sleeping == {"kv_cache"}:
            self.engine.fail("the KV cache sleeps: wake_up(tags=['kv_cache']) first")
        elif not self.executor.asleep:
            self.engine.resume(start_over=has_stored_scales(self.executor.worker.model))
