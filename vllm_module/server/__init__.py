"""HTTP: the OpenAI protocol on an :class:`~vllm_module.AsyncLLM`, and what operators need."""

from vllm_module.base.messages import install
from vllm_module.errors import MissingPackageError

try:
    import starlette as _starlette  # noqa: F401  # imported to name the extra if it is missing
    import uvicorn as _uvicorn  # noqa: F401
except ImportError as error:
    raise MissingPackageError(
        f"vllm_module.server serves HTTP with starlette and uvicorn: {install('serve')}"
    ) from error
